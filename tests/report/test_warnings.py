"""Clients that weights silence, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from fedunfold.report.insights import ranked
from fedunfold.report.warnings import silenced
from fedunfold.runs.influence import Influence, Peak
from tests.support.run_records import federation, group, method

ALL = [[True, True], [True, True]]


def told(weights: list[list[float]], took: list[list[bool]], counts: tuple[tuple[int, ...], ...]) -> list[str]:
    weighed = replace(method("afl", [[50, 60]]), influence=Influence.of([weights], [took]))
    return list(silenced(group(weighed, of=federation(counts))))


def test_a_client_with_less_than_a_fifth_of_its_share() -> None:
    # 8 and 12 of 20 samples: a fifth of 0.4 is 0.08, and the mean of 0.06 and 0.08 is 0.07.
    found = told([[0.06, 0.94], [0.08, 0.92]], ALL, ((8,), (12,)))
    assert found == [
        "afl all but silences client north: its mean weight over the 2 rounds is 0.07, against 0.4 by size.",
        "afl gives client south 0.94 of the weight in round 1, against 0.6 by size: the others hardly count there.",
    ]
    assert told([[0.11, 0.89], [0.11, 0.89]], ALL, ((8,), (12,))) == []
    assert ranked(group(replace(method("a", [[1]]), influence=Influence.of([[[0.01, 0.99]]], [ALL[:1]])))).warnings


def test_a_small_client_and_an_absent_one_are_not_silenced() -> None:
    assert told([[0.0, 0.5], [0.0, 0.5]], ALL, ((4,), (96,))) == []  # a share of 4 %
    absent = [[False, True], [False, True]]
    assert told([[0.0, 1.0], [0.0, 1.0]], absent, ((8,), (12,))) == [], "who is alone has all of the weight"
    seldom = [[False, True], [True, True]]
    assert told([[0.0, 1.0], [0.4, 0.6]], seldom, ((8,), (12,))) == []


def test_every_trial_counts_by_itself_and_they_may_differ_in_length() -> None:
    found = Influence.of([[[0.5, 0.5]], [[0.3, 0.7], [0.95, 0.05]]], [[[True, True]], ALL])
    assert found.when_present == pytest.approx(np.array([1.75 / 3, 1.25 / 3]))
    assert found.peak == Peak(client=0, round=1, weight=0.95)
