"""What the outer steps are worth, on a small federation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.schedule_study import (
    Schedules,
    Standing,
    checked_iterations,
    measure_schedules,
    schedules_figure,
    schedules_page,
    time_to,
)

from benchmarks import schedule_study as module
from fedunfold.plotting import save

STANDINGS = {
    "fast": tuple(Standing(m, m / 10, (5.0 - m, 5.2 - m), (50.0 + m, 52.0 + m)) for m in range(4)),
    "paper": tuple(Standing(m, m / 10, (5.0 - m / 4, 5.2 - m / 4), (50.0, 52.0)) for m in range(9)),
}
FOUND = Schedules({"device": "a GPU", "cores": 4, "torch": "2"}, {"made-up": STANDINGS})


def test_few_iterations_are_all_looked_at_and_the_last_always() -> None:
    assert checked_iterations(1) == [0, 1]
    assert checked_iterations(15) == list(range(16))
    assert checked_iterations(50) == [*range(16), 24, 38, 50]


def test_the_page_tells_when_the_papers_last_loss_was_reached(tmp_path: Path) -> None:
    assert time_to(STANDINGS["fast"], 3.1) == STANDINGS["fast"][2]
    assert time_to(STANDINGS["fast"], 0.0) is None
    text = schedules_page(FOUND, "figure.png")
    assert "| made-up | by size | 0 | 0 | 5.1 | 51.0 ± 1.4 | |" in text
    assert "| made-up | fast | 3 | 0.30 | 2.1 | 54.0 ± 1.4 | 2 steps, 0.20 s |" in text
    late = replace(FOUND, environments={"made-up": STANDINGS | {"fast": STANDINGS["fast"][:2]}})
    assert "| made-up | fast | 1 | 0.10 | 4.1 | 52.0 ± 1.4 | never |" in schedules_page(late, "figure.png")
    save(schedules_figure(FOUND), tmp_path / "figure.png")


def test_both_schedules_start_alike_and_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKS", 2)
    monkeypatch.setattr(module, "TRIALS", 2)
    monkeypatch.setattr(module, "FAST", {"iterations": 3})
    monkeypatch.setattr(module, "published", lambda iterations, lr: {"iterations": 2, "lr": lr, "optimizer": "adam"})
    found = measure_schedules(["digits-label-skew"], "cpu").environments["digits-label-skew"]
    assert found["fast"][0].losses == found["paper"][0].losses
    assert [standing.iteration for standing in found["fast"]] == [0, 1, 2, 3]
    assert np.all(np.diff([standing.seconds for standing in found["fast"]]) > 0)
    assert found["fast"][-1].loss < found["fast"][0].loss
