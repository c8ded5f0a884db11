"""The records of a benchmark, from which its page is made."""

from collections.abc import Mapping

from fedunfold.core.task import PrimaryMetric
from fedunfold.studies.benchmark.records import RunRecord, RunRecords
from tests.fuzz.judging import resealed, scratch, understood
from tests.fuzz.mutation import of_json as mutate

__all__ = ["fuzz", "mutate", "seeds"]

MADE = RunRecord("e", "m", "", "m", "trial-0", PrimaryMetric(), [50.0, 60.0], 60.0, [3, 2], 2, 100)


def fuzz(data: bytes) -> bool:
    records = RunRecords(scratch() / "benchmark")
    file = records.place("e", "m", "") / "trial-0.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(resealed(data))
    found: list[RunRecord | None] = []
    refused = not understood(lambda: found.append(records.find("e", "m", "", "trial-0", "m")), "records", "record")
    if refused or found[0] is None:
        return False
    _ = found[0].metric, found[0].final, found[0].validated
    return True


def seeds() -> Mapping[str, bytes]:
    records = RunRecords(scratch() / "benchmark")
    records.save(MADE)
    diverged = RunRecord("e", "m", "", "m", "trial-0", PrimaryMetric(), ended="it diverged")
    first = (records.place("e", "m", "") / "trial-0.json").read_bytes()
    records.save(diverged)
    return {"trial": first, "diverged": (records.place("e", "m", "") / "trial-0.json").read_bytes()}
