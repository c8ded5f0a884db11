"""Times of a device: what is divided by what, and that everything is really done."""

import json
from dataclasses import replace

import pytest
from benchmarks.device import DeviceBench, OnDevice, device_page, measure_device, steps_of_a_run
from benchmarks.timing import Timed

from benchmarks import device
from tests.support.federations import tiny

MACHINE = {"device": "a processor", "cores": 2, "torch": "2"}


def test_a_round_lasts_as_long_as_its_longest_local_training() -> None:
    """In minibatches of 3, clients of 7, 4 and 9 samples with 1, 2 and 2 epochs make 3, 4 and 6 steps."""
    assert steps_of_a_run(tiny(rounds=5)) == 5 * 6


def test_the_page_divides_a_learning_by_its_steps() -> None:
    run, runs, one, ten, exact = (Timed(t, t / 2, t * 2) for t in (0.5, 2.0, 0.25, 0.5, 1.5))
    on = OnDevice(2410, 100, 15, Timed(0.03, 0.015, 0.06), run, runs, one, ten, exact)
    text = device_page(DeviceBench(MACHINE, {"made-up": on, "on a GPU": replace(on, busy=0.024)}))
    assert "| made-up | 2410 | 100 | 20.0 (10.0 to 40.0) | 0.03 |  |" in text
    assert "| on a GPU | 2410 | 100 | 20.0 (10.0 to 40.0) | 0.03 | 80 |" in text
    assert "| made-up | 0.500 | 2.000 | 4.0 | 0.250 | 0.500 | 2.0 | 1.500 | 3.0 |" in text


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "environment", lambda name: tiny())
    found = measure_device(["tiny"], "cpu", 1)
    on = found.environments["tiny"]
    assert (on.steps, on.parameters) == (3 * 6, 5 * 4 + 4 + 4 * 3 + 3)
    assert min(t.least for t in (on.learning, on.run, on.runs, on.sample, on.samples, on.exact)) > 0
    assert json.loads(json.dumps(found.as_json()))["environments"]["tiny"]["iterations"] == 15
