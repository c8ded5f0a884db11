"""What a study has found so far: a file for every set of weights and every trial.

A record is written whole, under a name that says what it is, and never computed again while it is there and its
checksum holds. So a run that was killed goes on where it was, and the results depend on the records alone.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.io.atomic import write_atomically
from fedunfold.io.checkpoint import DamagedError, first_difference, read_record, remove_checkpoint, write_record
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies.reproduction.studies import Setting, StudyCase
from fedunfold.unfolding import Learning

SETTING = "setting.json"
log = logging.getLogger(__name__)
LISTS = {"accuracies", "class_accuracy"}
NUMBERS = {"rounds", "client_steps", "participations", "seconds"}
TRIAL = LISTS | NUMBERS


@dataclass(frozen=True)
class Records:
    """The folder `records/`, with a folder for every case and in it one for every entry."""

    folder: Path

    @property
    def begun(self) -> bool:
        """Whether an earlier call was here."""
        return (self.folder / SETTING).exists()

    def weights(self, case: StudyCase, name: str) -> LearnedWeights | None:
        """None where there are none, or damaged ones, which are taken away."""
        file = self.weights_file(case, name)
        if not file.exists():
            return None
        try:
            return LearnedWeights.load(file)
        except DamagedError:
            _again(file)
            return None

    def weights_file(self, case: StudyCase, name: str) -> Path:
        return self._file(case, name, "weights.safetensors")

    def has_weights(self, case: StudyCase, name: str, learning: Learning | None = None) -> bool:
        """Whether they are there; where `learning` is given, learned that way."""
        if learning is None:
            return self.weights_file(case, name).exists()
        found = self.weights(case, name)
        if found is not None and found.settings.get("learning") != json.loads(json.dumps(asdict(learning))):
            raise InputError(
                f"{self.folder / case.name / name} holds weights that were learned in another way; delete that "
                "folder, or choose another --out."
            )
        return found is not None

    def checkpoint(self, case: StudyCase, name: str, trial: int | None = None) -> Path:
        """Where a learning or a trial keeps what it needs to go on."""
        what = "learning" if trial is None else f"trial-{trial}"
        return self._file(case, name, f"checkpoint-{what}.safetensors")

    def keep_weights(self, case: StudyCase, name: str, learned: LearnedWeights, seconds: float) -> None:
        write_record(self._file(case, name, "learning.json"), {"seconds": round(seconds, 2)})
        learned.save(self.weights_file(case, name))
        remove_checkpoint(self.checkpoint(case, name))

    def has_trial(self, case: StudyCase, name: str, trial: int) -> bool:
        """Whether it is there and whole; a damaged one is taken away."""
        file = self._file(case, name, f"trial-{trial}.json")
        if not file.exists():
            return False
        try:
            _read(file, TRIAL)
        except DamagedError:
            _again(file)
            return False
        return True

    def keep_trial(self, case: StudyCase, name: str, trial: int, result: RunResult, steps: int, seconds: float) -> None:
        content: dict[str, Any] = {
            "accuracies": result.accuracies,
            "class_accuracy": result.evaluations[-1].class_accuracy.tolist(),
            "rounds": len(result.evaluations),
            "client_steps": steps,
            "participations": int(result.present.sum()),
            "rejected": dict(Counter(entry.client for entry in result.rejected)),
            "seconds": round(seconds, 2),
        }
        write_record(self._file(case, name, f"trial-{trial}.json"), content)
        remove_checkpoint(self.checkpoint(case, name, trial))

    def trials(self, case: StudyCase, name: str, most: int) -> list[dict[str, Any]]:
        """The trials there are, in order, `most` at most."""
        found: list[dict[str, Any]] = []
        while len(found) < most and self.has_trial(case, name, len(found)):
            found.append(_read(self._file(case, name, f"trial-{len(found)}.json"), TRIAL))
        return found

    def seconds(self, cases: list[StudyCase]) -> float:
        """Time that all records of these cases took to make, added up."""
        folders = [self.folder / case.name for case in cases]
        files = [f for folder in folders for kind in ("learning", "trial-*") for f in folder.glob(f"*/{kind}.json")]
        return sum(float(_read(file, {"seconds"})["seconds"]) for file in files)

    def _file(self, case: StudyCase, name: str, file: str) -> Path:
        return self.folder / case.name / name / file


def check_same(records: Records, setting: Setting, cases: Iterable[StudyCase]) -> None:
    """Records of other settings or of other data must not be mixed in: the folder remembers what it was made with."""
    ours = {"schedule": setting.schedule, "seed": setting.seed, "device": setting.device}
    _same(records.folder / SETTING, ours, f"{records.folder} holds records of another setting")
    for case in cases:
        file = records.folder / case.name / "data.json"
        _same(file, {"digest": case.digest}, f"{file.parent} holds records of other data or clients")


def _same(file: Path, ours: dict[str, Any], otherwise: str) -> None:
    if not file.exists():
        write_record(file, ours)
    elif difference := first_difference(read_record(file, set(ours)), ours):
        raise InputError(f"{otherwise} ({difference}); choose another --out, or delete {file.parent}.")


def write_json(file: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """One JSON document, whole or not at all."""
    text = json.dumps(content, indent=indent) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _again(file: Path) -> None:
    """A damaged record is no record: what it held is computed again."""
    log.warning("record %s is damaged; it is made again.", file)
    file.unlink()


def _read(file: Path, names: Set[str]) -> dict[str, Any]:
    """A record with these names, numbers and lists of numbers where a trial has such."""
    content = read_record(file, names)
    for name in sorted(names & TRIAL):
        values = content[name] if name in LISTS else [content[name]]
        if not (isinstance(values, list) and all(type(value) in (int, float) for value in values)):
            raise DamagedError(f"record {file} is damaged ('{name}' is something else); delete it and run again.")
    return content
