"""Short pre-trainings that differ in one thing."""

import pytest
from benchmarks.pretraining_study import VARIANTS, measure_pretraining, pretraining_page

from benchmarks import pretraining_study
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.learner import Pretraining

TINY = Distribution(rounds=(2, 3), samples=(60, 80), clients=(3, 4), features=(4, 5), digits=0, pictures=0, sampled=0)


def test_every_variant_differs_in_something_that_can_be_set() -> None:
    settings = [Pretraining(**changes) for changes in VARIANTS.values()]
    assert len({made.model_dump_json() for made in settings}) == len(VARIANTS)


def test_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"steps": 2, "federations": 2, "validation": 4, "width": 4, "distribution": TINY}
    monkeypatch.setattr(pretraining_study, "SHORT", short)
    monkeypatch.setattr("benchmarks.pretraining_study.os.cpu_count", lambda: 1)
    chosen = ["as it is by default", "gradients of first order"]
    study = measure_pretraining(chosen, lambda line: None)
    assert [row.found.step for row in study.rows] == [2, 2]
    assert study.rows[0].found != study.rows[1].found
    page = pretraining_page(study)
    assert "4 drawn federations" in page
    assert f"| {chosen[1]} | {study.rows[1].found.mean:+.2f} |" in page
