"""Asynchronous rounds: equal to synchronous ones where they are the same, else by hand; resumed to the byte."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.config.clock import Clock, Training
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.core.run_result import RunResult
from fedunfold.local import nova
from fedunfold.rules import dr, fedbuff, size
from fedunfold.rules.features import read_features
from fedunfold.training.clock import clock_for
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, method
from tests.support.federations import RUN, Plain, assert_same, mlp, simulated, tiny

ASYNCHRONOUS = Algorithm(schedule="asynchronous", absent="drop")


def traced(**seconds: float) -> tuple[Training, ...]:
    return tuple(Training(client=key, seconds=value) for key, value in seconds.items())


def run(env: Environment, rule: Any, algorithm: Algorithm, file: Path | None = None, **more: Any) -> RunResult:
    federation = simulated(env)
    clock = clock_for(env, federation.data, algorithm, env.rounds)
    (result,) = run_rounds(
        federation, rule, env.rounds, [RUN], algorithm=algorithm, clock=clock, checkpoint=file, **more
    )
    return result


@pytest.mark.parametrize("rule", [size(), dr(), fu.pretrained()], ids=lambda rule: rule.name)
def test_with_a_buffer_of_all_clients_rounds_are_synchronous(rule: Any) -> None:
    env = tiny(rounds=4, clock=Clock(buffer=3, concurrency=3, speed_spread=1.0, delay=1.0))
    together, waiting = run(env, rule, ASYNCHRONOUS), run(env, rule, Algorithm(absent="drop"))
    assert torch.equal(together.model, waiting.model)
    assert together.times == pytest.approx(waiting.times) and together.staleness == (0.0,) * 4
    assert torch.equal(together.participated, waiting.participated)


def test_fedbuff_without_stale_updates_is_the_plain_mean() -> None:
    env = tiny(rounds=3, clock=Clock(buffer=3))
    assert_same(run(env, fedbuff(), ASYNCHRONOUS).model, run(env, fu.uniform(), Algorithm()).model)
    assert_same(run(env, fedbuff(by="size"), ASYNCHRONOUS).model, run(env, size(), Algorithm()).model)


@pytest.mark.parametrize("a", [0.0, 0.5, 2.0])
def test_four_steps_by_hand(a: float) -> None:
    """The timetable of `test_timetable.test_events_by_hand`: c's update enters the fourth step, three steps old."""
    env = tiny(rounds=4, clock=Clock(trace=traced(a=1, b=3, c=10), buffer=2))
    plain, models = Plain(env, mlp(env)), [simulated(env).initial_model(RUN)]
    for first, second in (((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2), (1, 2)), ((0, 3), (2, 0))):
        step = len(models) - 1
        updates = [
            (1 + step - t) ** -a / 2 * (plain.train(models[t], t, k).model - models[t]) for k, t in (first, second)
        ]
        models.append(models[-1] + updates[0] + updates[1])
    result = run(env, fedbuff(a), ASYNCHRONOUS)
    assert_same(result.model, models[-1])
    assert result.times == (3.0, 6.0, 9.0, 10.0)
    assert result.staleness == (0.0, 0.0, 0.0, 1.5)
    assert result.participated.tolist() == [[True, True, False]] * 3 + [[True, False, True]]


def test_the_pretrained_rule_reads_how_old_an_update_is() -> None:
    report = ClientUpdates(
        round=5,
        client_ids=("a", "b"),
        num_examples=torch.tensor([1.0, 1.0]),
        participated=torch.tensor([True, True]),
        num_steps=torch.tensor([1, 1]),
        updates=OpenUpdates(torch.tensor([0, 1]), torch.eye(2)),
        staleness=torch.tensor([0, 3]),
    )
    found = read_features(report, None, None, ("staleness",), ("age",))
    assert found.of_clients.flatten().tolist() == pytest.approx([0.0, np.log(4)])
    # Two rounds on, what the server remembers of b is two steps older.
    later = ClientUpdates(
        round=7,
        client_ids=("a", "b"),
        num_examples=torch.tensor([1.0, 1.0]),
        participated=torch.tensor([True, False]),
        num_steps=torch.tensor([1, 0]),
        updates=OpenUpdates(torch.tensor([0]), torch.eye(2)[:1]),
        remembered=OpenUpdates(torch.tensor([0, 1]), torch.eye(2)),
        staleness=torch.tensor([1, 0]),
    )
    found = read_features(later, found.state, None, ("staleness",), ("age",))
    assert found.of_clients.flatten().tolist() == pytest.approx([np.log(2), np.log(6)])


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    env = tiny(rounds=2, clock=Clock(trace=traced(a=1, b=4, c=2)))
    assert run(env, size(), Algorithm()).times == (4.0, 8.0)
    lost = (*traced(a=1, c=2), Training(client="b", seconds=4, lost=True), Training(client="b", seconds=3))
    result = run(env.replace(clock=Clock(trace=lost)), size(), Algorithm())
    assert result.times == (2.0, 5.0)
    assert result.participated[:, 1].tolist() == [False, True]


def test_a_limit_ends_a_run() -> None:
    env = tiny(rounds=9, clock=Clock(trace=traced(a=1, b=4, c=2), limit=9, buffer=1))
    assert run(env, size(), Algorithm()).times == (4.0, 8.0, 12.0)
    assert run(env, fedbuff(), ASYNCHRONOUS).times[-1] <= 9


@pytest.mark.parametrize("killed_after", [0, 3])
@pytest.mark.parametrize("algorithm", [ASYNCHRONOUS, Algorithm()], ids=lambda part: part.schedule)
def test_runs_resume_byte_for_byte(tmp_path: Path, killed_after: int, algorithm: Algorithm) -> None:
    def stop(t: int, _: object) -> None:
        if t == killed_after:
            raise SystemExit

    env = tiny(rounds=6, clock=Clock(speed_spread=1.5, jitter=0.5, buffer=1))
    whole, file = tmp_path / "whole.safetensors", tmp_path / "run.safetensors"
    expected = run(env, dr(), algorithm, whole)
    with pytest.raises(SystemExit):
        run(env, dr(), algorithm, file, on_round=stop)
    resumed = run(env, dr(), algorithm, file)
    assert torch.equal(resumed.model, expected.model) and resumed.times == expected.times
    assert file.read_bytes() == whole.read_bytes()
    with pytest.raises(InputError, match=r"run\.safetensors"):
        run(env.replace(clock=Clock(speed_spread=1.4, jitter=0.5, buffer=1)), dr(), algorithm, file)


def test_metrics_of_clients_arrive_with_their_updates() -> None:
    seen: list[ClientUpdates] = []

    def weigh(report: ClientUpdates, state: Any) -> Any:
        seen.append(report)
        return torch.full((3,), 1 / 3, dtype=torch.float64), state

    env = tiny(rounds=4, clock=Clock(trace=traced(a=1, b=3, c=10), buffer=2))
    plain = Plain(env, mlp(env))
    run(env, fu.rule("loss", "accuracy")(weigh), ASYNCHRONOUS)
    model = simulated(env).initial_model(RUN)
    late = seen[3].metric("loss")
    assert late[2] == pytest.approx(sum(plain.train(model, 0, 2).losses), rel=1e-5) and late[1].isnan()
    assert seen[3].num_steps.tolist()[1:] == [0, 6] and seen[3].staleness is not None
    assert seen[3].metric("accuracy").isfinite().tolist() == [True, False, True]


def test_a_client_that_diverges_is_rejected_when_it_trains_and_absent_when_it_is_due() -> None:
    good, labels = np.eye(4, 5), [0, 1, 2, 0]
    clients = {"a": (good, labels), "b": (np.full((4, 5), 1e30), labels), "c": (good, labels)}
    clock = Clock(trace=traced(a=1, b=1.5, c=2), buffer=1)
    env = Environment.from_arrays(clients, (good, labels), rounds=3, batch_size=2, lr=0.1, epochs=2, clock=clock)
    result = fu.run(env, Method("stale", ASYNCHRONOUS, size()))  # in float32
    assert [(entry.round, entry.client) for entry in result.rejected] == [(0, "b")]
    assert result.participated.tolist() == [[True, False, False], [False] * 3, [True, False, False]]
    assert result.model.isfinite().all()


def test_methods_by_name() -> None:
    chosen = method("fedbuff")
    assert chosen.algorithm.schedule == "asynchronous" and chosen.rule is not None and chosen.rule.name == "fedbuff"
    assert method("fedunfold-fedbuff").algorithm.schedule == "asynchronous"
    assert method("dr-fedbuff").rule is not None
    assert Algorithm.from_description(chosen.algorithm.describe()) == chosen.algorithm
    env = tiny(rounds=3, clock=Clock(speed_spread=1.0))
    table = fu.compare(env, ["fedavg", "fedbuff"], trials=2)
    assert [len(found.times) for found in table.methods] == [3, 3]
    assert all(row["time"] > 0 for row in table.records())
    assert "simulated time (s)" in table.other_metrics and "times" in table.as_json()["methods"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"clock": Clock(buffer=4)},
            "field clock.buffer: the server waits for the updates of 4 clients, and those of 3",
        ),
        (
            {"client_sampler": "round-robin", "clients_per_round": 2},
            "client sampler 'round-robin' draws the clients of",
        ),
        ({"clock": Clock(trace=traced(a=1, b=2))}, "the trace of the clock has no row for client 'c'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fu.run(tiny(**changes), "fedbuff")


def test_what_asynchronous_rounds_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="nova scales the steps of a client by those of the others"):
        Algorithm(nova(), schedule="asynchronous")
    with pytest.raises(InputError, match="simulated, by a clock, and here is none"):
        run_rounds(simulated(tiny()), size(), 1, algorithm=ASYNCHRONOUS)
    with pytest.raises(InputError, match="cannot be learned through asynchronous rounds"):
        fu.learn_weights(tiny(), algorithm=ASYNCHRONOUS)
    with pytest.raises(InputError, match="unknown schedule of rounds 'sometimes'"):
        Algorithm(schedule="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the exponent a of fedbuff"):
        fedbuff(-1.0)
    with pytest.raises(InputError, match="by 'count' or by 'size', not by 'weight'"):
        fedbuff(by="weight")


def test_time_to_a_score() -> None:
    env = tiny(rounds=4, clock=Clock())
    result = fu.run(env)
    assert result.time_to(max(result.scores)) == result.times[result.scores.index(max(result.scores))]
    assert result.time_to(1.01) is None and fu.run(env.replace(clock=None)).time_to(0.0) is None
    assert Method("x", ASYNCHRONOUS, size()).algorithm == ASYNCHRONOUS
