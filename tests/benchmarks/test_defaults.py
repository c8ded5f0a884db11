"""Settings that methods of the benchmark have anywhere: those with the largest mean gain on drawn federations."""

import json
import tomllib
from pathlib import Path

import pytest
from benchmarks.defaults import FILE, Candidate, best, candidates, choose_defaults
from benchmarks.rule.records import Record
from benchmarks.rule.sections import choice

from fedunfold.core.errors import InputError
from fedunfold.studies.benchmark.contenders import Contender, contenders

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "rule" / "records" / "tuning.json"
METHODS = {
    "fedavg": Contender(base="fedavg", grid=("server=sgd:lr=1", "server=sgd:lr=2")),
    "fedunfold": Contender(base="fedunfold", parts=""),
    "duw-fedavg": Contender(base="duw-fedavg", grid=("outer_lr=0.1", "outer_lr=0.2")),
}


def record(environment: str, method: str, score: float | None) -> Record:
    scores = [] if score is None else [score]
    return Record("tuning", environment, method, 0, "", "accuracy", True, score, score, scores, 1.0)


def test_the_defaults_that_are_shipped_agree_with_the_rivals_of_the_rule() -> None:
    """Both were chosen on the same federations."""
    found = choice([Record(**entry) for entry in json.loads(RECORDS.read_text(encoding="utf-8"))])
    known = contenders()
    assert {name: f"server={server}" for name, server in found.items()} == {name: known[name].default for name in found}
    assert all(known[name].tuned_on == 96 for name in found)


def test_what_is_shipped_is_a_setting_of_the_grid() -> None:
    shipped = tomllib.loads(FILE.read_text(encoding="utf-8"))
    known = contenders()
    assert shipped and all(entry["default"] in known[name].grid for name, entry in shipped.items() if name in known)


def test_the_largest_mean_gain_is_chosen() -> None:
    """Gains of the second setting 2 and −1, of the first 1 and 1; where FedAvg diverges nothing is compared."""
    entered = candidates(METHODS)
    assert [one.label for one in entered] == ["fedavg server=sgd:lr=1", "fedavg server=sgd:lr=2"]
    first, second = (one.label for one in entered)
    found = [record("tuning-0", "fedavg", 50.0), record("tuning-0", first, 51.0), record("tuning-0", second, 52.0)]
    found += [record("tuning-1", "fedavg", 60.0), record("tuning-1", first, 61.0), record("tuning-1", second, 59.0)]
    found += [record("tuning-2", "fedavg", None), record("tuning-2", first, 10.0), record("tuning-2", second, 99.0)]
    assert best(found, entered) == {"fedavg": {"default": "server=sgd:lr=1", "gain": 1.0, "tuned_on": 3}}
    with pytest.raises(InputError, match="no federation in which every setting was run"):
        best(found[:2], entered)


def test_it_runs_what_has_no_record_and_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.defaults.contenders", lambda: METHODS)
    file, said = tmp_path / "defaults.toml", list[str]()
    choose_defaults(tmp_path / "records", 2, report=said.append, file=file)
    before = file.read_text(encoding="utf-8")
    assert tomllib.loads(before)["fedavg"]["tuned_on"] == 2
    assert len(json.loads((tmp_path / "records" / "tuning.json").read_text(encoding="utf-8"))) == 2 * 3
    monkeypatch.setattr(Candidate, "method", None)
    choose_defaults(tmp_path / "records", 2, file=file)
    assert file.read_text(encoding="utf-8") == before
