"""What is out of a rule's range: by hand, once per run, and in a run's warnings."""

import pytest
import torch

import fedunfold as fu
from fedunfold.rules.ranges import excess, noted, remark
from tests.support.federations import tiny
from tests.support.rules import FEATURES, small_rule

RANGES = torch.tensor([[0.0, -1.0, 2.0], [2.0, 1.0, 2.0]], dtype=torch.float64)


def z(*rows: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_the_excess_is_measured_in_lengths_of_the_range() -> None:
    found = excess(z((3.0, 0.0, 2.0), (-1.0, -2.0, 2.0)), RANGES)
    assert found.tolist() == [[0.5, 0.0, 0.0], [0.5, 0.5, 0.0]]


def test_a_feature_that_never_varied_has_a_range_all_the_same() -> None:
    assert float(excess(z((0.0, 0.0, 3.0)), RANGES)[0, 2]) == pytest.approx(1e6)


def test_the_farthest_value_and_all_rounds_are_noted() -> None:
    notes = noted(z((3.0, 0.0, 2.0), (5.0, 0.0, 2.0)), RANGES, 0, {})
    notes = noted(z((4.0, -1.5, 2.0)), RANGES, 2, notes)
    assert notes == {
        "0": {"excess": 1.5, "value": 5.0, "rounds": [0, 2]},
        "1": {"excess": 0.25, "value": -1.5, "rounds": [2]},
    }
    line = remark(notes, ("size", "steps", "norm"), RANGES)
    assert (
        "'size' was 5 (learned on 0 to 2) in rounds 1 and 3; 'steps' was -1.5 (learned on -1 to 1) in round 3." in line
    )


def test_what_is_inside_or_hardly_outside_is_not_noted() -> None:
    assert noted(z((2.01, 1.0, 2.0)), RANGES, 0, {}) == {}


def test_a_run_says_it_once() -> None:
    ranges = small_rule().ranges
    assert ranges is not None
    narrow = ranges.clone()
    narrow[:, FEATURES.index("clients")] = torch.tensor([5.0, 6.0], dtype=torch.float64)
    inside, outside = (fu.run(tiny(rounds=3), small_rule(ranges=given)) for given in (ranges, narrow))
    assert inside.warnings == ()
    (line,) = outside.warnings
    assert (
        "unlike those that the rule was learned on: 'clients' was 1.1 (learned on 5 to 6) in rounds 1, 2 and 3" in line
    )
