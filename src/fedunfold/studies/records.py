"""What a study has found so far: a file for every set of weights and every trial.

A record is written whole, under a name that says what it is, and never computed again while it exists and its checksum
holds. So a study that was killed is resumed where it was, and the results depend on the records alone.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.core.run_result import RunResult
from fedunfold.io.checkpoint import DamagedError, first_difference, read_record, remove_checkpoint, write_record
from fedunfold.rules.learned import LearnedWeights
from fedunfold.studies.cases import Setting, StudyCase
from fedunfold.studies.rows import StudyRow
from fedunfold.unfolding import Learning

SETTING = "setting.json"
LISTS = {"accuracies", "class_accuracy"}
NUMBERS = {"rounds", "client_steps", "participations", "seconds"}
TRIAL = LISTS | NUMBERS

log = logging.getLogger(__name__)
Found = TypeVar("Found")
Trial = dict[str, Any]


@dataclass(frozen=True)
class StudyRecords:
    """The records of all cases of a study, by the names of case and row.

    Attributes:
        folder: Has a folder for every case, and in it one for every row.
    """

    folder: Path

    @property
    def begun(self) -> bool:
        """Whether there may be records to resume from."""
        return (self.folder / SETTING).exists()

    def weights(self, case: StudyCase, name: str) -> LearnedWeights | None:
        """Learned weights, where there are some."""
        return _load(self.weights_file(case, name), LearnedWeights.load)

    def weights_file(self, case: StudyCase, name: str) -> Path:
        """Where learned weights are."""
        return self._file(case, name, "weights.safetensors")

    def has_weights(self, case: StudyCase, name: str, learning: Learning | None = None) -> bool:
        """Whether there are learned weights.

        Raises:
            InputError: They were learned by another `learning` than the one given.
        """
        if learning is None:
            return self.weights_file(case, name).exists()
        found = self.weights(case, name)
        if found is not None and found.settings.get("learning") != json.loads(json.dumps(asdict(learning))):
            raise InputError(
                f"{self.folder / case.name / name} holds weights that were learned in another way; delete that "
                "folder, or choose another `out`."
            )
        return found is not None

    def checkpoint(self, case: StudyCase, name: str, trial: int | None = None) -> Path:
        """Where learning weights, or a trial, saves what resuming needs."""
        what = "learning" if trial is None else f"trial-{trial}"
        return self._file(case, name, f"checkpoint-{what}.safetensors")

    def save_weights(self, case: StudyCase, name: str, learned: LearnedWeights, seconds: float) -> None:
        """Learned weights, and how long learning them took."""
        write_record(self._file(case, name, "learning.json"), {"seconds": round(seconds, 2)})
        learned.save(self.weights_file(case, name))
        remove_checkpoint(self.checkpoint(case, name))

    def trial(self, case: StudyCase, name: str, trial: int) -> Trial | None:
        """One trial, where there is such a record."""
        return _load(self._file(case, name, f"trial-{trial}.json"), lambda file: _read(file, TRIAL))

    def save_trial(self, case: StudyCase, name: str, trial: int, result: RunResult, steps: int, seconds: float) -> None:
        """The result of a trial.

        Args:
            case: What it was run on.
            name: The row's name.
            trial: Its number.
            result: What came out.
            steps: How many local steps its clients made.
            seconds: How long it took.
        """
        content: dict[str, Any] = {
            "accuracies": result.scores,
            "class_accuracy": result.evaluations[-1].class_accuracy.tolist(),
            "rounds": len(result.evaluations),
            "client_steps": steps,
            "participations": int(result.participated.sum()),
            "rejected": dict(Counter(entry.client for entry in result.rejected)),
            "seconds": round(seconds, 2),
        }
        write_record(self._file(case, name, f"trial-{trial}.json"), content)
        remove_checkpoint(self.checkpoint(case, name, trial))

    def trials(self, case: StudyCase, name: str, most: int) -> list[Trial]:
        """The trials with a record, in order, `most` at most."""
        found: list[Trial] = []
        while len(found) < most and (trial := self.trial(case, name, len(found))) is not None:
            found.append(trial)
        return found

    def seconds(self, cases: Iterable[StudyCase]) -> float:
        """Time that all records of these cases took to make, added up."""
        folders = [self.folder / case.name for case in cases]
        files = [f for folder in folders for kind in ("learning", "trial-*") for f in folder.glob(f"*/{kind}.json")]
        return sum(float(_read(file, {"seconds"})["seconds"]) for file in files)

    def _file(self, case: StudyCase, name: str, file: str) -> Path:
        return self.folder / case.name / name / file


@dataclass(frozen=True)
class CaseRecords:
    """The records of one case, as tables, figures and findings read them; accuracies in percent.

    Attributes:
        case: The case.
        rows: What was run on it.
        records: Those of the study.
    """

    case: StudyCase
    rows: Sequence[StudyRow]
    records: StudyRecords

    def trials(self, name: str) -> list[Trial]:
        """The trials of a row that have a record; none where there is no such row."""
        most = next((row.trials for row in self.rows if row.name == name), 0)
        return self.records.trials(self.case, name, most)

    def finals(self, name: str) -> list[float]:
        """Accuracy after the last round of every trial; on what clients hold out, the mean over the classes."""
        if self.case.held_out:
            return [100 * float(np.nanmean(trial["class_accuracy"])) for trial in self.trials(name)]
        return [100 * trial["accuracies"][-1] for trial in self.trials(name)]

    def weights(self, name: str) -> np.ndarray | None:
        """Learned Θ, [T, K], where there are some."""
        found = self.records.weights(self.case, name)
        return None if found is None else np.asarray(found.weights.numpy())


def curves(trials: Iterable[Trial]) -> np.ndarray:
    """Accuracy after every round, in percent, [trials, rounds]."""
    return 100 * np.array([trial["accuracies"] for trial in trials])


def check_same(records: StudyRecords, setting: Setting, cases: Iterable[StudyCase]) -> None:
    """Refuse to mix in records of other settings or of other data: the folder says what it was made with.

    Args:
        records: Those there may be.
        setting: How the study is run now.
        cases: Its cases.

    Raises:
        InputError: Something differs.
    """
    ours = {"schedule": setting.schedule, "seed": setting.seed, "device": setting.device}
    _same(records.folder / SETTING, ours, f"{records.folder} holds records of another setting")
    for case in cases:
        file = records.folder / case.name / "data.json"
        _same(file, {"digest": case.digest}, f"{file.parent} holds records of other data or clients")


def _same(file: Path, ours: dict[str, Any], otherwise: str) -> None:
    if not file.exists():
        write_record(file, ours)
    elif difference := first_difference(read_record(file, set(ours)), ours):
        raise InputError(f"{otherwise} ({difference}); choose another `out`, or delete {file.parent}.")


def _load(file: Path, read: Callable[[Path], Found]) -> Found | None:
    """None where there is no such record, or a damaged one, which is deleted: what it held is computed again."""
    if not file.exists():
        return None
    try:
        return read(file)
    except DamagedError:
        log.warning("record %s is damaged; it is made again.", file)
        file.unlink()
        return None


def _read(file: Path, names: Set[str]) -> dict[str, Any]:
    """A record with these names, numbers and lists of numbers where a trial has such."""
    content = read_record(file, names)
    for name in sorted(names & TRIAL):
        values = content[name] if name in LISTS else [content[name]]
        if not (isinstance(values, list) and all(type(value) in (int, float) for value in values)):
            raise DamagedError(f"record {file} is damaged ('{name}' is something else); delete it and run again.")
    return content
