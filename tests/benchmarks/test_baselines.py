"""Baselines do the same work as the engine, and the page says what was measured."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.timing import Bench, Timed

from benchmarks import baselines, growth_figure, page, scaling, timing, workload
from fedunfold.core.errors import InputError
from fedunfold.core.params import flat_model
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.training.loop import Algorithm, run_rounds
from fedunfold.unfolding.adjoint import unfold

SHARES = [(70, 2), (55, 1), (120, 1)]


def test_the_plain_loop_trains_the_engines_model() -> None:
    env = workload.federation(SHARES, rounds=3, random=True)
    found = flat_model(baselines.plain_loop(env))
    expected = run_rounds(SimulatedFederation(env), size(), env.rounds).model
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_unrolled_graph_gives_the_engines_gradient() -> None:
    env = workload.federation(SHARES, rounds=3, random=True)
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    federation = SimulatedFederation(env)
    start = federation.initial_model("learn-0")
    expected = unfold(federation, theta, Algorithm(), OuterLoss(), "first_order", run="learn-0", model=start).gradient
    found = baselines.unrolled_step(env, theta)
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def test_operations_by_hand() -> None:
    sides = 784 * 128 + 128 * 128 + 128 * 10
    # Two operations for each weight and sample: forwards, its gradient, and back through all layers but the first.
    per_sample = 2 * (2 * sides + 128 * 128 + 128 * 10)
    assert workload.operations(SHARES) == per_sample * (70 * 2 + 55 + 120)


def test_contenders_take_turns() -> None:
    order: list[str] = []
    seconds = timing.side_by_side({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 4
    assert [len(times) for times in seconds.values()] == [3, 3], "the first turn warms up"


@pytest.fixture
def bench() -> Bench:
    timed = Timed(0.2, 0.1, 0.3)
    outer = dict.fromkeys(("plain run", "first_order", "exact"), timed) | {"unrolled": replace(timed, median=2.0)}
    machine = {"device": "a processor", "cores": 2, "torch": "2", "threads": 2, "compiled_walk": True}
    points = tuple(scaling.Point(scaling.Size(clients=k), k / 10, 2**20 * k, 2**30, 0.0) for k in (5, 20, 80))
    large = scaling.Point(scaling.LARGE, 4.0, 2**29, 2**31, 0.0)
    grown = scaling.Scaling({"clients": points}, large, {"full": points[0], "half": replace(points[0], error=2e-5)})
    rounds = {"engine": timed, "plain loop": replace(timed, median=0.8)}
    memory, start_up = {"exact": 2**21}, {"import": timed}
    return Bench(machine, workload.MNIST, 1e11, rounds, 0.05, {"label-skew": outer}, memory, grown, start_up)


def test_the_page_shows_ratios_of_what_was_measured(bench: Bench) -> None:
    text = page(bench, "figure.png")
    for shown in (
        "| plain loop | 800 (100 to 300) | 4.0 |",
        "| floor | 50 | 0.25 |",
        "| unrolled | 2.00 (0.10 to 0.30) | 10.00 |",
        "| clients | 5 to 80 | 0.50 to 8.00 | 1.00 | 5 to 80 |",
        "| half | 5 | 0.50 | 2.0e-05 |",
        "The paper's schedule of 400 steps by *unrolled* would take 800 s on *label-skew*, the fast one of 15 steps by "
        "*first_order* 3 s: 267 times less.",
        "(figure.png)",
        "1000 clients of which 50 are there in a round, 100 rounds, 24100 parameters: 4.0 s a step",
    ):
        assert shown in text
    assert json.loads(json.dumps(bench.as_json()))["floor"] == 0.05
    assert "WeightedStrategy" not in text


def test_the_page_says_where_nothing_was_compiled(bench: Bench) -> None:
    assert "background" in page(bench, "figure.png")
    text = page(replace(bench, machine={**bench.machine, "compiled_walk": False}), "figure.png")
    assert "installed without a compiler" in text
    assert "background" not in text


def test_without_mnist_the_images_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_mnist", lambda: None)
    assert workload.images() == workload.RANDOM
    made, asked = (workload.federation(SHARES, rounds=1, random=random).load() for random in (False, True))
    assert made.sizes == (70, 55, 120)
    assert torch.equal(made.x, asked.x)


def test_the_page_says_what_our_strategy_costs(bench: Bench) -> None:
    timed = {"FedAvg": 0.4, "WeightedStrategy": 0.41}
    found = {f"flower simulation, {name}": Timed(median, 0.3, 0.5) for name, median in timed.items()}
    text = page(replace(bench, round={**bench.round, **found}), "figure.png")
    assert "changes a round by +2.5 %" in text


def test_the_figure_has_a_fitted_line_through_every_row_of_points(bench: Bench) -> None:
    seconds, memory = growth_figure(bench.scaling).axes
    for axes, values in ((seconds, [0.5, 2, 8]), (memory, [5, 20, 80])):
        line, points = (np.asarray(drawn.get_ydata()) for drawn in axes.get_lines())
        assert points.tolist() == values
        assert line == pytest.approx(values)
        assert axes.get_title(loc="left") == "slope 1.00"


def test_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "COMPUTATION_SKEW", [(60, 1), (60, 1)])
    monkeypatch.setattr(workload, "ROUNDS", 1)
    monkeypatch.setattr(workload, "_mnist", lambda: None)
    assert timing.growth("unrolled") >= 0


def test_a_point_of_the_growth_is_measured_in_a_process_of_its_own() -> None:
    point = json.loads(scaling.said(scaling.Size(clients=3, rounds=2), "half"))
    assert point["seconds"] > 0
    assert point["peak"] > point["growth"] >= 0
    assert 0 < point["error"] < 1e-3


def test_another_simulator_tells_its_seconds_in_the_last_line() -> None:
    program = "import json, sys; print('loading'); print([json.loads(sys.argv[1])['rounds'] / 4, 1, 3])"
    timed = timing.other_simulator("another", f'{sys.executable} -c "{program}"')
    assert timed == Timed(2.0, 1.0, 3.0)
    for wrong, why in (("no-such-program", "no-such-program cannot be run"), ("echo nothing", "as a JSON list")):
        with pytest.raises(InputError, match=why):
            timing.other_simulator("another", wrong)
