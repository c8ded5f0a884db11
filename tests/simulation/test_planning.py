"""What is drawn ahead is what would be drawn when it is needed."""

import threading

import numpy as np
import pytest
import torch

from fedunfold.simulation import planning
from fedunfold.simulation.planning import Planner
from fedunfold.simulation.schedule import Draw, Plan, Share, plan, sample_coefficients

SHARES = (Share("a", 0, 7, 2), Share("b", 7, 3, 1), Share("c", 10, 5, 3))


def planner_of() -> Planner:
    return Planner(3, 3, torch.device("cpu"), torch.float64)


def walks(round: int, *clients: int) -> tuple[tuple[Draw, Share], ...]:
    return tuple((Draw(5, "learn-0", round), SHARES[k]) for k in clients)


@pytest.mark.parametrize("ahead", ["not", "drawn", "uploaded"])
def test_schedules_and_coefficients(ahead: str) -> None:
    planner = planner_of()
    training, fixed = walks(4, 0, 2), walks(4, 1)
    if ahead != "not":
        planner.look_ahead(training, [fixed])
    if ahead == "uploaded":
        planner.upload()
    found, expected = planner.schedule(training), plan(training, 3, 3)
    assert found.rows.tolist() == expected.rows.tolist()
    assert (found.order, found.draws) == (expected.order, expected.draws)
    assert planner.coefficients(fixed).tolist() == sample_coefficients(*fixed[0], 3).tolist()


def test_looking_ahead_draws_in_other_threads_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []

    def watched(*arguments: object) -> Plan:
        where.append(threading.current_thread().name)
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "plan", watched)
    planner = planner_of()
    planner.look_ahead(walks(1, 0, 1), [])
    planner.schedule(walks(1, 0, 1))
    assert len(where) == 1 and where[0].startswith("fedunfold-planning")


def test_a_round_is_kept_while_the_next_one_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[threading.Thread] = []

    def watched(draw: Draw, share: Share, batch_size: int) -> np.ndarray:
        where.append(threading.current_thread())
        return sample_coefficients(draw, share, batch_size)

    monkeypatch.setattr(planning, "sample_coefficients", watched)
    planner = planner_of()
    planner.look_ahead(walks(1, 0), [walks(1, 1)])
    planner.look_ahead(walks(2, 0), [walks(2, 1)])
    for round in (1, 2):
        assert planner.coefficients(walks(round, 1)).tolist() == sample_coefficients(*walks(round, 1)[0], 3).tolist()
    assert len(where) == 2 and threading.main_thread() not in where


def test_what_was_not_expected_is_drawn_now() -> None:
    planner = planner_of()
    planner.look_ahead(walks(1, 0, 1), [walks(1, 2)])
    assert planner.schedule(walks(2, 0, 1)).rows.tolist() == plan(walks(2, 0, 1), 3, 3).rows.tolist()
    assert planner.schedule(walks(1, 0)).rows.tolist() == plan(walks(1, 0), 3, 3).rows.tolist()


def test_an_error_while_looking_ahead_is_raised_where_the_plan_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> np.ndarray:
        raise MemoryError("no room")

    monkeypatch.setattr(planning, "sample_coefficients", broken)
    planner = planner_of()
    planner.look_ahead((), [walks(1, 2)])
    with pytest.raises(MemoryError, match="no room"):
        planner.coefficients(walks(1, 2))
