"""Baselines do the same work as the engine, and the page says what was measured."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.__main__ import app, main
from benchmarks.markdown import growth_figure, page_of
from benchmarks.timing import Bench, Timed
from typer.testing import CliRunner

from benchmarks import baselines, scaling, timing, workload
from fedunfold.core.errors import InputError
from fedunfold.core.params import flatten_model
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds

SHARES = [(70, 2), (55, 1), (120, 1)]


def test_the_plain_loop_trains_the_engines_model() -> None:
    env = workload.federation(SHARES, rounds=3, random=True)
    found = flatten_model(baselines.plain_loop(env))
    (expected,) = run_rounds(SimulatedFederation(env), size(), env.rounds)
    torch.testing.assert_close(found, expected.model, rtol=1e-4, atol=1e-6)


def test_the_unrolled_graph_gives_the_engines_gradient() -> None:
    env = workload.federation(SHARES, rounds=3, random=True)
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    expected = workload.outer_step(SimulatedFederation(env), theta, "first_order")
    found = baselines.unrolled_step(env, theta)
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def test_operations_by_hand() -> None:
    sides = 784 * 128 + 128 * 128 + 128 * 10
    # Two operations for each weight and sample: forwards, its gradient, and back through all layers but the first.
    per_sample = 2 * (2 * sides + 128 * 128 + 128 * 10)
    assert workload.operations(SHARES) == per_sample * (70 * 2 + 55 + 120)


def test_contenders_take_turns() -> None:
    order: list[str] = []
    seconds = timing.time_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 4
    assert [len(times) for times in seconds.values()] == [3, 3], "the first turn warms up"


@pytest.fixture
def bench() -> Bench:
    timed = Timed(0.2, 0.1, 0.3)
    outer = dict.fromkeys(("plain run", "first_order", "exact"), timed) | {"unrolled": replace(timed, median=2.0)}
    machine = {"device": "a processor", "cores": 2, "torch": "2", "threads": 2, "compiled_backend": True}
    points = tuple(scaling.Point(scaling.Size(clients=k), k / 10, 2**20 * k, 2**30, 0.0) for k in (5, 20, 80))
    large = scaling.Point(scaling.LARGE, 4.0, 2**29, 2**31, 0.0)
    grown = scaling.Scaling({"clients": points}, large, {"full": points[0], "half": replace(points[0], error=2e-5)})
    rounds = {"engine": timed, "plain loop": replace(timed, median=0.8)}
    memory, start_up = {"exact": 2**21}, {"import": timed}
    return Bench(machine, workload.MNIST, 1e11, rounds, 0.05, {"label-skew": outer}, memory, grown, start_up)


def test_the_page_shows_ratios_of_what_was_measured(bench: Bench) -> None:
    text = page_of(bench, "figure.png")
    for shown in (
        "| plain loop | 800 (100 to 300) | 4.0 |",
        "| floor | 50 | 0.25 |",
        "| unrolled | 2.00 (0.10 to 0.30) | 10.00 |",
        "| clients | 5 to 80 | 0.50 to 8.00 | 1.00 | 5 to 80 |",
        "| half | 5 | 0.50 | 2.0e-05 |",
        "The paper's schedule of 400 steps by *unrolled* would take 800 s on *label-skew*, the fast one of 15 steps by "
        "*first_order* 3 s: 267 times less.",
        "(figure.png)",
        "1000 clients of which 50 train in a round, 100 rounds, 24100 parameters: 4.0 s a step",
    ):
        assert shown in text
    assert json.loads(json.dumps(bench.as_json()))["floor"] == 0.05
    assert "WeightedStrategy" not in text


def test_the_page_says_where_nothing_was_compiled(bench: Bench) -> None:
    assert "background" in page_of(bench, "figure.png")
    text = page_of(replace(bench, machine={**bench.machine, "compiled_backend": False}), "figure.png")
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
    text = page_of(replace(bench, round={**bench.round, **found}), "figure.png")
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
    point = json.loads(scaling.measure_here(scaling.Size(clients=3, rounds=2), "half"))
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


@pytest.mark.parametrize("name", ["engine", "schedules", "device"])
def test_every_benchmark_has_a_command(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0 and f"Example: python -m benchmarks {name}" in result.output


def test_a_simulator_needs_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "engine", "--other", "FedJAX"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --other FedJAX: give it as NAME=COMMAND.\n"
