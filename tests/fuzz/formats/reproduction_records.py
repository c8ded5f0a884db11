"""The records of a study, from which its tables are made."""

import json
from collections.abc import Mapping

from fedunfold.environments import environment
from fedunfold.experiments.reproduction.records import TRIAL, Records, check_same
from fedunfold.experiments.reproduction.studies import Case, Setting
from tests.fuzz.judging import scratch, understood_by_any
from tests.fuzz.mutation import of_json as mutate

__all__ = ["fuzz", "mutate", "seeds"]

CASE = Case(environment("digits-flaky"))


def fuzz(data: bytes) -> bool:
    folder = scratch() / "records"
    for name in ("setting.json", f"{CASE.name}/fedavg/trial-0.json", f"{CASE.name}/fedavg/learning.json"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    records = Records(folder)
    readers = (
        lambda: check_same(records, Setting(), []),
        lambda: records.trials(CASE, "fedavg", 3),
        lambda: records.seconds([CASE]),
    )
    return understood_by_any(readers, "records")


def seeds() -> Mapping[str, bytes]:
    numbers = {name: [0.5, 0.25] if name in ("accuracies", "class_accuracy") else 3 for name in sorted(TRIAL)}
    setting = {"schedule": "fast", "seed": 0, "device": "cpu"}
    return {"trial": json.dumps(numbers).encode(), "setting": json.dumps(setting).encode()}
