"""What a study has found so far: a file for every set of weights and every trial.

A record is written whole, under a name that says what it is, and never computed again while it is there. So a
run that was killed goes on where it was, and the results depend on the records alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedunfold.errors import InputError
from fedunfold.experiments.reproduction.studies import Case, Setting
from fedunfold.files import write_atomically
from fedunfold.rounds import RunResult
from fedunfold.weighting.learned import LearnedWeights


@dataclass(frozen=True)
class Records:
    """The folder `records/`, with a folder for every case and in it one for every entry."""

    folder: Path

    def weights(self, case: Case, name: str) -> LearnedWeights | None:
        file = self._file(case, name, "weights.safetensors")
        return LearnedWeights.load(file) if file.exists() else None

    def has_weights(self, case: Case, name: str) -> bool:
        return self._file(case, name, "weights.safetensors").exists()

    def checkpoint(self, case: Case, name: str) -> Path:
        """Where a learning keeps what it needs to go on."""
        return self._file(case, name, "checkpoint.safetensors")

    def keep_weights(self, case: Case, name: str, learned: LearnedWeights, seconds: float) -> None:
        write_json(self._file(case, name, "learning.json"), {"seconds": round(seconds, 2)})
        learned.save(self._file(case, name, "weights.safetensors"))
        self.checkpoint(case, name).unlink(missing_ok=True)

    def has_trial(self, case: Case, name: str, trial: int) -> bool:
        return self._file(case, name, f"trial-{trial}.json").exists()

    def keep_trial(self, case: Case, name: str, trial: int, result: RunResult, steps: int, seconds: float) -> None:
        content = {
            "accuracies": result.accuracies,
            "class_accuracy": result.evaluations[-1].class_accuracy.tolist(),
            "rounds": len(result.evaluations),
            "client_steps": steps,
            "participations": int(result.present.sum()),
            "seconds": round(seconds, 2),
        }
        write_json(self._file(case, name, f"trial-{trial}.json"), content)

    def trials(self, case: Case, name: str, most: int) -> list[dict[str, Any]]:
        """The trials there are, in order, `most` at most."""
        found: list[dict[str, Any]] = []
        while len(found) < most and self.has_trial(case, name, len(found)):
            found.append(_read(self._file(case, name, f"trial-{len(found)}.json")))
        return found

    def seconds(self, cases: list[Case]) -> float:
        """Time that all records of these cases took to make, added up."""
        files = [file for case in cases for file in (self.folder / case.name).glob("*/*.json")]
        return sum(float(_read(file).get("seconds", 0)) for file in files)

    def _file(self, case: Case, name: str, file: str) -> Path:
        return self.folder / case.name / name / file


def check_same(records: Records, setting: Setting) -> None:
    """Records of other settings must not be mixed in: the folder remembers the ones it was made with."""
    file = records.folder / "setting.json"
    ours = {"schedule": setting.schedule, "seed": setting.seed, "device": setting.device}
    if not file.exists():
        write_json(file, ours)
    elif _read(file) != ours:
        raise InputError(f"{records.folder} holds records of another schedule, seed or device; choose another --out.")


def write_json(file: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """One JSON document, whole or not at all."""
    text = json.dumps(content, indent=indent) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"record {file} is damaged ({error}); delete it and run again.") from error
    return content
