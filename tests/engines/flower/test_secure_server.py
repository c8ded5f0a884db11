"""Secure aggregation: the open federation's numbers, and a server that gets sums and single numbers alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor

from fedunfold.aggregation import median
from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.engines.flower import RemoteFederation, client_app, client_from_environment, federation_from_environment
from fedunfold.engines.flower.secagg.fixed_point import encode, error_bound
from fedunfold.engines.flower.secagg.protocol import ShareDelivery, read
from fedunfold.engines.flower.secure_client import SECURE
from fedunfold.engines.flower.wire import read_instruction
from fedunfold.local import nova, prox
from fedunfold.rules import (
    Rule,
    afl,
    dr,
    fedadp,
    fedawa,
    feddisco,
    fedfa,
    fixed,
    online_hypergradient,
    q_fedavg,
    size,
    uniform,
)
from fedunfold.rules.pretrained import pretrained
from fedunfold.rules.rule import WeightingRule
from fedunfold.rules.unfolded import PrivateRule, UnfoldedRule, initial_parameters
from fedunfold.server import adam, fedlws
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, UnrolledResult, unroll_and_grad
from tests.engines.flower.test_server import remote
from tests.support.federations import simulated, tiny
from tests.support.grid import LocalGrid
from tests.support.run_names import named_as_given
from tests.support.site_keys import fresh_folder, node_configs

SIZES = {"a": 7, "b": 4, "c": 9, "d": 5, "e": 8}
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 10 * error_bound(5)}  # three rounds carry the error of their sums on

Fails = Callable[[str, str, int], bool]
"""Whether a client fails to answer: by its key, the kind of message, and how many of that kind it had before."""


@pytest.fixture(autouse=True)
def _names_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    named_as_given(monkeypatch)


def five(**settings: Any) -> Environment:
    return tiny(SIZES, **settings)


class Flaky(LocalGrid):
    """Clients of secure sums that trust no server, some of which fail some of the time."""

    def __init__(self, env: Environment, fails: Fails | None = None, **settings: Any) -> None:
        keys = env.load().keys
        app = client_app(lambda context: client_from_environment(env, context, torch.float64))
        configs = node_configs(fresh_folder(), keys, **{"max-projections": 1000, **settings})
        super().__init__(app, {100 + k: configs[key] for k, key in enumerate(keys)})
        self.received: list[tuple[Message, Message]] = []
        counts: dict[tuple[str, str], int] = {}

        def answer(message: Message, context: Context) -> Message:
            key, kind = str(context.node_config["client-id"]), message.metadata.message_type.removeprefix("query.")
            seen = counts[key, kind] = counts.get((key, kind), -1) + 1
            if fails is not None and fails(key, kind, seen):
                raise RuntimeError("gone")
            reply = app(message, context)
            self.received.append((message, reply))
            return reply

        self.app = answer  # type: ignore[assignment]


def secure(env: Environment, fails: Fails | None = None) -> RemoteFederation:
    return federation_from_environment(Flaky(env, fails), env, dtype=torch.float64, secure_aggregation=True)


def gone(key: str, kind: str, when: int) -> Fails:
    return lambda *message: message == (key, kind, when)


@pytest.mark.parametrize(
    ("rule", "absent"),
    [
        (size(), "keep"),
        (uniform(), "drop"),
        (fixed([[0.1, 0.2, 0.3, 0.3, 0.1]] * 3), "keep"),
        (dr(), "drop"),
        (dr(loss="start"), "keep"),
        (fedfa(), "drop"),
        (feddisco(), "drop"),
        (q_fedavg(), "keep"),
        (afl(), "drop"),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_runs(rule: WeightingRule, absent: Any) -> None:
    env = five(participation_probability=0.8, seed=3)
    algorithm = Algorithm(nova(), absent=absent)
    here, there = (run_rounds(f, rule, 3, algorithm=algorithm)[0] for f in (simulated(env), secure(env)))
    assert torch.equal(here.participated, there.participated)
    assert not here.participated.all()
    torch.testing.assert_close(there.weights, here.weights, **TOLERANCE)
    torch.testing.assert_close(there.model, here.model, **TOLERANCE)
    assert there.scores == here.scores


@pytest.mark.parametrize("sampler", ["importance", "power-of-choice"])
def test_cohorts_by_what_clients_reported(sampler: str) -> None:
    """Norms and losses are single numbers, which the server gets beside secure sums too."""
    env = five(clients_per_round=3, client_sampler=sampler, seed=3)
    here, there = (run_rounds(f, size(), 4)[0] for f in (simulated(env), secure(env)))
    assert torch.equal(here.participated, there.participated)
    assert len({tuple(row) for row in here.participated.tolist()}) > 1
    torch.testing.assert_close(there.model, here.model, **TOLERANCE)


def unfolded(clients: Any, adjoint: AdjointKind, outer: Any = "path", **algorithm: Any) -> UnrolledResult:
    theta = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    return at(theta, clients, adjoint, outer, **algorithm)


def at(theta: Tensor, clients: Any, adjoint: AdjointKind, outer: Any, **algorithm: Any) -> UnrolledResult:
    start = clients.initial_model("learn-0")
    loss = OUTER_LOSSES.make(outer)
    (found,) = unroll_and_grad(clients, theta, Algorithm(**algorithm), loss, adjoint, runs=["learn-0"], models=[start])
    return found


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize(
    ("outer", "algorithm"),
    [
        ("path", {}),
        ("balanced", {"local": prox(0.3), "absent": "drop"}),
        ("final", {"server": adam()}),
        ("mse", {"absent_loss": "skip", "step_sizes": (1.0, 0.5)}),
    ],
)
def test_gradients(adjoint: AdjointKind, outer: str, algorithm: dict[str, Any]) -> None:
    env = five(participation_probability=0.8, seed=3)
    here, there = (unfolded(f, adjoint, outer, **algorithm) for f in (simulated(env), secure(env)))
    assert there.loss == pytest.approx(here.loss, rel=1e-10)
    torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(there.step_gradient, here.step_gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_learned_weights(adjoint: AdjointKind) -> None:
    env = five(participation_probability=0.8, seed=3)
    how: dict[str, Any] = {"step_sizes": "learned", "initial_model": "resample"}
    learning = Learning(iterations=2, lr=0.1, adjoint=adjoint, **how)
    here, there = (learn(f, 2, learning=learning) for f in (simulated(env), secure(env)))
    torch.testing.assert_close(there.weights, here.weights, **TOLERANCE)


@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_sampled_clients(absent: Any) -> None:
    env = five(clients_per_round=3)
    algorithm = Algorithm(nova(), absent=absent)
    here, there = (run_rounds(f, size(), 3, algorithm=algorithm)[0] for f in (simulated(env), secure(env)))
    assert here.participated.sum(1).tolist() == [3, 3, 3]
    assert torch.equal(here.participated, there.participated)
    torch.testing.assert_close(there.model, here.model, **TOLERANCE)
    for adjoint in get_args(AdjointKind):
        one, other = (
            unfolded(f, adjoint, "balanced", local=nova(), absent=absent) for f in (simulated(env), secure(env))
        )
        torch.testing.assert_close(other.gradient, one.gradient, rtol=1e-8, atol=1e-10)


def test_a_round_without_anybody() -> None:
    """Its outer gradients are summed at once, because nobody is in the backward pass."""
    env = five(participation_probability=0.0)
    here, there = (unfolded(f, "exact") for f in (simulated(env), secure(env)))
    assert there.loss == pytest.approx(here.loss, rel=1e-10)
    torch.testing.assert_close(there.gradient, torch.zeros(2, 5, dtype=torch.float64))


# --- clients that are lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["measure", "advertise", "share", "mask"])
@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_a_client_lost_before_its_vector_came_is_absent(stage: str, absent: Any) -> None:
    env = five()
    algorithm = Algorithm(absent=absent)
    clients = secure(env, gone("b", stage, 0))
    (found,) = run_rounds(clients, size(), 2, algorithm=algorithm)
    assert found.participated.tolist() == [[True, False, True, True, True], [True] * 5]
    assert clients.failures.as_dict() == {"b": {"failed": 1}}
    (expected,) = run_rounds(without_b(env, 0), size(), 2, algorithm=algorithm)
    torch.testing.assert_close(found.model, expected.model, **TOLERANCE)


def without_b(env: Environment, missed: int) -> RemoteFederation:
    """An open federation in which b trains, but does not answer, in one round."""
    return remote(env, lambda key, kind, t, reply: None if (key, kind, t) == ("b", "train", missed) else reply)


def test_a_client_lost_after_its_vector_came_is_in_the_sum() -> None:
    env = five()
    clients = secure(env, gone("b", "unmask", 1))
    (found,) = run_rounds(clients, size(), 2)
    assert found.participated.all()
    assert clients.failures.as_dict() == {"b": {"failed": 1}}
    torch.testing.assert_close(found.model, run_rounds(simulated(env), size(), 2)[0].model, **TOLERANCE)


def test_a_client_that_restarts_within_a_sum_is_lost_for_that_sum_alone(caplog: pytest.LogCaptureFixture) -> None:
    env = five()
    grid = Flaky(env)
    honest = grid.app

    def restarting(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.mask" and len(grid.received) < 30:
            context = Context(1, 1, context.node_config, RecordDict(), {}) if context.node_id == 101 else context
        return honest(message, context)

    grid.app = restarting  # type: ignore[assignment]
    clients = federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True)
    (found,) = run_rounds(clients, size(), 2)
    assert found.participated.tolist() == [[True, False, True, True, True], [True] * 5]
    assert "client 'b' knows nothing of this sum; it may have restarted" in caplog.text


def test_fewer_than_the_threshold() -> None:
    env = five()
    clients = secure(env, lambda key, kind, seen: kind == "mask" and key in "abc" and seen == 1)
    with pytest.raises(FederationError, match="round 1: 2 clients sent a vector to the secure sum, and at least 4"):
        run_rounds(clients, size(), 3)


@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_gradients_are_those_of_the_sum_that_was_made(absent: Any) -> None:
    """The open federation's are checked by finite differences (test_server)."""
    env = five()
    here, there = (
        unfolded(clients, "exact", "final", absent=absent, local=nova())
        for clients in (without_b(env, 1), secure(env, gone("b", "mask", 1)))
    )
    assert there.loss == pytest.approx(here.loss, rel=1e-10)
    torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-8, atol=1e-10)
    assert (abs(float(there.gradient[1, 1])) < 1e-12) == (absent == "drop")


def test_one_missing_inner_product_is_worked_out_from_the_sum() -> None:
    env = five()
    expected = unfolded(simulated(env), "first_order").gradient
    clients = secure(env, gone("b", "inner_products", 1))
    torch.testing.assert_close(unfolded(clients, "first_order").gradient, expected, rtol=1e-8, atol=1e-10)
    assert clients.failures.as_dict() == {"b": {"failed": 1}}


def test_an_adjoint_is_computed_without_one_client(caplog: pytest.LogCaptureFixture) -> None:
    clients = secure(five(), gone("b", "mask", 3))  # two sums of updates, the final evaluation, then the backward pass
    assert torch.isfinite(unfolded(clients, "exact").gradient).all()
    assert "round 1: the adjoint is computed without b" in caplog.text


# --- what the server gets ----------------------------------------------------------------------------------


def vectors_behind(env: Environment, grid: Flaky) -> list[tuple[np.ndarray, np.ndarray]]:
    """(plain, masked) for every vector that clients sent."""
    found = []
    for message, reply in grid.received:
        if message.metadata.message_type == "query.mask":
            context = Context(1, 1, grid.nodes[message.metadata.dst_node_id], RecordDict(), {})
            client, delivery = (
                client_from_environment(env, context, torch.float64),
                read(message.content, ShareDelivery),
            )
            made = getattr(client, delivery.message_type)(*read_instruction(message.content)).arrays[delivery.array]
            masked = reply.content.array_records["arrays"]["masked"].numpy().view(np.uint64)
            found.append((delivery.weight * made.numpy(), masked))
    return found


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_no_message_shows_a_single_vector(adjoint: AdjointKind) -> None:
    env = five(model=(64,), participation_probability=0.8, seed=3)
    grid = Flaky(env)
    unfolded(federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True), adjoint, "balanced")
    pairs = vectors_behind(env, grid)
    assert len(pairs) > 20
    deviation = len(pairs[0][0]) ** -0.5
    for plain, masked in pairs:
        assert np.abs(plain).max() > 0
        hidden = encode(plain, 5)
        assert np.mean(masked == hidden) == 0
        for shown in (masked.astype(np.float64), masked.view(np.int64).astype(np.float64)):
            assert abs(np.corrcoef(plain, shown)[0, 1]) < 6 * deviation
        assert abs(np.mean(masked >> np.uint64(63)) - 0.5) < 6 * 0.5 * deviation
    for number, (_, masked) in enumerate(pairs):
        assert all(np.mean(masked == other) == 0 for _, other in pairs[:number])
    others = [reply.content for message, reply in grid.received if message.metadata.message_type != "query.mask"]
    assert all(not record for content in others for record in content.array_records.values())
    for _, reply in grid.received:
        for record in reply.content.metric_records.values():
            assert all(isinstance(number, float) for number in record.values())
        payloads = [v for r in reply.content.config_records.values() for v in r.values() if isinstance(v, bytes | list)]
        pieces = [p for v in payloads for p in ([v] if isinstance(v, bytes) else v) if isinstance(p, bytes)]
        assert sum(map(len, pieces)) < 8 * len(pairs[0][0])  # keys and shares: too short to hold a vector


def test_the_same_vector_never_looks_the_same() -> None:
    env = five()
    grids = [Flaky(env), Flaky(env)]
    for grid in grids:
        run_rounds(federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True), size(), 1)
    for (plain, masked), (again, other) in zip(*(vectors_behind(env, grid) for grid in grids), strict=True):
        assert np.array_equal(plain, again)
        assert not np.any(masked == other)


# --- what is refused ---------------------------------------------------------------------------------------


def test_rules_and_absences_that_need_single_vectors() -> None:
    env = five()
    grid = Flaky(env)
    clients = federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True)
    registered = len(grid.sent)
    with pytest.raises(InputError, match="reveals no gradients of single clients, which rules such as fedadp need"):
        run_rounds(clients, fedadp(), 1)
    with pytest.raises(
        InputError, match="reveals no updates of single clients, which the server stores under 'remember'"
    ):
        run_rounds(clients, size(), 1, algorithm=Algorithm(absent="remember"))
    with pytest.raises(InputError, match="under 'remember'"):
        learning = Learning(iterations=1, initial_model="resample")
        learn(clients, 1, algorithm=Algorithm(absent="remember"), learning=learning)
    for algorithm in (Algorithm(filter="norm"), Algorithm(aggregator=median()), Algorithm(server=fedlws())):
        with pytest.raises(
            InputError, match=r"which the filter by norm, the aggregators .* and the server fedlws compare"
        ):
            run_rounds(clients, size(), 1, algorithm=algorithm)
    assert len(grid.sent) == registered


@pytest.mark.parametrize("rule", [fedawa(), online_hypergradient()], ids=lambda rule: rule.name)
def test_rules_that_read_single_updates_are_refused_in_the_first_round(rule: Rule) -> None:
    with pytest.raises(InputError, match="no update of a single client; use their weighted sum, or run without it"):
        run_rounds(secure(five()), rule, 1)


def test_single_updates_are_refused() -> None:
    clients = secure(five())
    model = clients.initial_model("trial-0")
    (report,) = clients.train([Algorithm().request("trial-0", 0, model)])
    assert report.updates.clients.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="no update of a single client; use their weighted sum"):
        _ = report.updates.rows
    with pytest.raises(InputError, match="no update of a single client; use their weighted sum"):
        UnfoldedRule(initial_parameters(4, 0))(report, None)


def test_inner_products_before_a_sum() -> None:
    """Each client's own number; NaN of one that does not answer."""
    env = five()
    here, there = simulated(env), secure(env, gone("b", "inner_products", 0))
    model = here.initial_model("trial-0")
    request = Algorithm().request("trial-0", 0, model)
    (opened,), (kept,) = here.train([request]), there.train([request])
    expected = opened.updates.inner_products(model)
    expected[1] = torch.nan
    torch.testing.assert_close(kept.updates.inner_products(model), expected, equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize("absent", ["keep", "drop"])
def test_a_private_rule(absent: Any) -> None:
    """What it decides of norms, projections and aggregates is what it decides in the simulation."""
    env = five(participation_probability=0.8, seed=3)
    drawn = torch.Generator().manual_seed(2)
    params = {
        name: value + torch.randn(value.shape, generator=drawn, dtype=torch.float64)
        for name, value in PrivateRule.initial(6, 0).params.items()
    }
    rule, algorithm, grid = PrivateRule(params, horizon=4), Algorithm(nova(), absent=absent), Flaky(env)
    clients = federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True)
    here, there = (run_rounds(f, rule, 4, algorithm=algorithm)[0] for f in (simulated(env), clients))
    sizes = torch.tensor(list(SIZES.values())) / sum(SIZES.values())
    assert float((here.weights[-1] - sizes).abs().max()) > 0.01
    torch.testing.assert_close(there.weights, here.weights, **TOLERANCE)
    torch.testing.assert_close(there.model, here.model, **TOLERANCE)
    # Of every client that participates, and after the first round, one number and one part of one sum.
    kinds = Counter(message.metadata.message_type for message, _ in grid.received)
    rounds = here.participated.sum(1)
    assert kinds["query.mask"] == rounds.sum() and kinds["query.inner_products"] == rounds[1:].sum()


def test_the_private_rule_that_comes_with_the_package() -> None:
    """With its server and its momentum, the same as in the simulation, and unlike averaging."""
    env, rule = five(participation_probability=0.8, seed=3), pretrained("private")
    assert rule.algorithm is not None
    clients = federation_from_environment(Flaky(env), env, dtype=torch.float64, secure_aggregation=True)
    here, there = (run_rounds(f, rule, 4, algorithm=rule.algorithm)[0] for f in (simulated(env), clients))
    torch.testing.assert_close(there.weights, here.weights, **TOLERANCE)
    torch.testing.assert_close(there.model, here.model, **TOLERANCE)
    averaged = run_rounds(simulated(env), size(), 4, algorithm=rule.algorithm)[0]
    assert float((here.model - averaged.model).norm()) > 1e-3


def test_a_secure_client_answers_no_open_message(caplog: pytest.LogCaptureFixture) -> None:
    env = five()
    clients = federation_from_environment(Flaky(env), env, dtype=torch.float64)
    assert not run_rounds(clients, size(), 1)[0].participated.any()
    assert "client 'a' takes part in secure aggregation alone and shows no vector of its own" in caplog.text


@pytest.mark.parametrize(
    ("node", "run", "shows"),
    [({}, {}, True), ({SECURE: True}, {SECURE: False}, False), ({}, {SECURE: True}, False)],
)
def test_the_run_or_the_node_makes_a_client_secure(node: Any, run: Any, shows: bool) -> None:
    env = five()
    grid = Flaky(env)
    run_rounds(federation_from_environment(grid, env, dtype=torch.float64, secure_aggregation=True), size(), 1)
    (sent,) = [
        m for m, _ in grid.received if (m.metadata.message_type, m.metadata.dst_node_id) == ("query.measure", 100)
    ]
    app = client_app(lambda context: client_from_environment(env, context, torch.float64))
    message = Message(sent.content, 100, "train")
    context = Context(1, 100, {"client-id": "a", **node}, RecordDict(), run)
    if shows:
        assert "updates" in app(message, context).content.array_records["arrays"]
    else:
        with pytest.raises(InputError, match="client 'a' takes part in secure aggregation alone"):
            app(message, context)


def test_a_vector_beyond_the_bound_makes_a_client_absent(caplog: pytest.LogCaptureFixture) -> None:
    env = five(lr=1e7)
    with pytest.raises(FederationError, match="round 0: 0 clients sent a vector"):
        run_rounds(secure(env), size(), 1)
    assert "not finite or beyond ±65536" in caplog.text
