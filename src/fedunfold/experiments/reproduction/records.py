"""What a study has found so far: a file for every set of weights and every trial.

A record is written whole, under a name that says what it is, and never computed again while it is there. So a
run that was killed goes on where it was, and the results depend on the records alone.
"""

import json
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedunfold.errors import InputError
from fedunfold.experiments.reproduction.studies import Case, Setting
from fedunfold.files import read_json, write_atomically
from fedunfold.rounds import RunResult
from fedunfold.unfolding import Learning
from fedunfold.weighting.learned import LearnedWeights

LISTS = {"accuracies", "class_accuracy"}
NUMBERS = {"rounds", "client_steps", "participations", "seconds"}
TRIAL = LISTS | NUMBERS


@dataclass(frozen=True)
class Records:
    """The folder `records/`, with a folder for every case and in it one for every entry."""

    folder: Path

    def weights(self, case: Case, name: str) -> LearnedWeights | None:
        file = self._file(case, name, "weights.safetensors")
        if not file.exists():
            return None
        try:
            return LearnedWeights.load(file)
        except InputError as error:
            raise InputError(f"record {file} is damaged; delete it and run again ({error})") from error

    def has_weights(self, case: Case, name: str, learning: Learning | None = None) -> bool:
        """Whether they are there; where `learning` is given, learned that way."""
        if learning is None:
            return self._file(case, name, "weights.safetensors").exists()
        found = self.weights(case, name)
        if found is not None and found.settings.get("learning") != json.loads(json.dumps(asdict(learning))):
            raise InputError(
                f"{self.folder / case.name / name} holds weights that were learned in another way; delete that "
                "folder, or choose another --out."
            )
        return found is not None

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
        content: dict[str, Any] = {
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
            found.append(_read(self._file(case, name, f"trial-{len(found)}.json"), TRIAL))
        return found

    def seconds(self, cases: list[Case]) -> float:
        """Time that all records of these cases took to make, added up."""
        folders = [self.folder / case.name for case in cases]
        files = [f for folder in folders for kind in ("learning", "trial-*") for f in folder.glob(f"*/{kind}.json")]
        return sum(float(_read(file, {"seconds"})["seconds"]) for file in files)

    def _file(self, case: Case, name: str, file: str) -> Path:
        return self.folder / case.name / name / file


def check_same(records: Records, setting: Setting, cases: Iterable[Case]) -> None:
    """Records of other settings or of other data must not be mixed in: the folder remembers what it was made with."""
    ours = {"schedule": setting.schedule, "seed": setting.seed, "device": setting.device}
    _same(records.folder / "setting.json", ours, f"{records.folder} holds records of another schedule, seed or device")
    for case in cases:
        file = records.folder / case.name / "data.json"
        _same(file, {"digest": case.digest}, f"{file.parent} holds records of other data or clients")


def _same(file: Path, ours: dict[str, Any], otherwise: str) -> None:
    if not file.exists():
        write_json(file, ours)
    elif _read(file, set(ours)) != ours:
        raise InputError(f"{otherwise}; choose another --out.")


def write_json(file: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """One JSON document, whole or not at all."""
    text = json.dumps(content, indent=indent) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _read(file: Path, names: Set[str]) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(file)
        missing = sorted(names - content.keys())
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"record {file} is damaged ({error}); delete it and run again.") from error
    if missing:
        raise InputError(f"record {file} is damaged (it has no '{missing[0]}'); delete it and run again.")
    for name in sorted(names & TRIAL):
        values = content[name] if name in LISTS else [content[name]]
        if not (isinstance(values, list) and all(type(value) in (int, float) for value in values)):
            raise InputError(f"record {file} is damaged ('{name}' is something else); delete it and run again.")
    return content
