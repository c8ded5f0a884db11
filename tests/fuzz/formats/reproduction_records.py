"""The records of a study, from which its tables are made."""

from collections.abc import Mapping

from fedunfold.config import environment
from fedunfold.io.checkpoint import write_record
from fedunfold.studies.cases import Setting, StudyCase
from fedunfold.studies.records import TRIAL, StudyRecords, check_same
from tests.fuzz.judging import resealed, scratch, understood_by_any
from tests.fuzz.mutation import of_json as mutate

__all__ = ["fuzz", "mutate", "seeds"]

CASE = StudyCase(environment("digits-flaky"))


def fuzz(data: bytes) -> bool:
    folder = scratch() / "records"
    for name in ("setting.json", f"{CASE.name}/fedavg/trial-0.json", f"{CASE.name}/fedavg/learning.json"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(resealed(data))
    records = StudyRecords(folder)
    readers = (
        lambda: check_same(records, Setting(), []),
        lambda: records.trials(CASE, "fedavg", 3),
        lambda: records.seconds([CASE]),
    )
    return understood_by_any(readers, "records")


def seeds() -> Mapping[str, bytes]:
    numbers: dict[str, object] = {
        name: [0.5, 0.25] if name in ("accuracies", "class_accuracy") else 3 for name in sorted(TRIAL)
    }
    setting: dict[str, object] = {"schedule": "fast", "seed": 0, "device": "cpu"}
    written: dict[str, dict[str, object]] = {"trial": numbers, "setting": setting}
    for name, content in written.items():
        write_record(scratch() / name, content)
    return {name: (scratch() / name).read_bytes() for name in written}
