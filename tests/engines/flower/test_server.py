"""Clients that train one by one give the numbers of the simulation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.messages import Broadcast, ClientUpdates, TrainRequest
from fedunfold.core.parts import LOCAL_OPTIMIZERS, OUTER_LOSSES, LocalOptimizer
from fedunfold.engines.flower.control import with_control
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import ClientDescription, ClientReply, MessageType, TrainInstruction
from fedunfold.engines.flower.server import Messages, RemoteFederation, Replies
from fedunfold.engines.flower.wire import instruction_record, read_instruction
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import accumulated, feddyn, momentum, nova, prox, scaffold, sgd
from fedunfold.rules import (
    Rule,
    afl,
    dr,
    fedadp,
    fedawa,
    feddisco,
    fedfa,
    online_hypergradient,
    q_fedavg,
    size,
    uniform,
)
from fedunfold.rules.rule import WeightingRule
from fedunfold.rules.size import size_shares
from fedunfold.server import adam, fedlws
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.federations import mlp, participation, simulated, tiny
from tests.support.outside_package.outside_parts import RMSprop


class InProcess:
    """A transport that hands every message to the client itself; `spoil` changes or loses a reply."""

    def __init__(
        self,
        env: Environment,
        spoil: Callable[[str, MessageType, int, ClientReply], ClientReply | str | None] | None = None,
    ):
        data = env.load()
        self.clients = {
            key: LocalClient(key, *data.client(k), data.task, mlp(env), torch.float64)
            for k, key in enumerate(data.keys)
        }
        self.states = {key: RecordDict() for key in data.keys}
        self.spoil = spoil
        self.received: list[tuple[str, MessageType, int]] = []

    def registrations(self) -> Sequence[ClientDescription]:
        return [client.register() for client in self.clients.values()]

    def send_and_receive(self, message_type: MessageType, messages: Messages) -> Replies:
        replies: dict[str, ClientReply | str] = {}
        for key, (instruction, arrays) in messages.items():
            self.received.append((key, message_type, instruction.round))
            # Over the wire, where parts travel as names and settings.
            instruction = TrainInstruction(**json.loads(instruction.model_dump_json()))
            answer = getattr(self.clients[key], message_type)
            reply: ClientReply | str | None = with_control(answer, instruction, arrays, self.states[key])
            if self.spoil is not None and isinstance(reply, ClientReply):
                reply = self.spoil(key, message_type, instruction.round, reply)
            if reply is not None:
                replies[key] = reply
        return replies


def remote(env: Environment, *spoil: Any) -> RemoteFederation:
    return RemoteFederation(InProcess(env, *spoil), env, mlp(env), simulated(env).evaluate, dtype=torch.float64)


def flaky(**settings: Any) -> Environment:
    return tiny(participation_probability=0.6, seed=3, **settings)


OPTIMIZERS = [sgd(), prox(0.3), nova(), momentum(0.5), accumulated(prox(0.3)), scaffold(), feddyn(0.4)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("rule", [size(), dr(), fedadp(), fedfa()], ids=lambda rule: rule.name)
def test_runs(optimizer: LocalOptimizer, rule: WeightingRule) -> None:
    env = flaky()
    algorithm = Algorithm(optimizer, absent="remember")
    here, there = (run_rounds(f, rule, 3, algorithm=algorithm)[0] for f in (simulated(env), remote(env)))
    assert torch.equal(here.participated, there.participated)
    assert not here.participated.all()
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)
    assert there.scores == here.scores


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
def test_gradients(adjoint: AdjointKind, optimizer: LocalOptimizer, absent_loss: Any) -> None:
    env = flaky()
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    algorithm = Algorithm(optimizer, absent="remember", absent_loss=absent_loss)
    outers = ["path", "balanced", "final-balanced", "mse"]
    for outer in outers:
        found = []
        for federation in (simulated(env), remote(env)):
            start = federation.initial_model("learn-0")
            loss = OUTER_LOSSES.make(outer)
            found += unroll_and_grad(federation, theta, algorithm, loss, adjoint, runs=["learn-0"], models=[start])
        here, there = found
        assert there.loss == pytest.approx(here.loss, rel=1e-12)
        torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(there.step_gradient, here.step_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_gradients_through_a_part_of_another_package(adjoint: AdjointKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weight decay, so that first order has clients compute backward too, without the curvature of the losses."""
    monkeypatch.setitem(LOCAL_OPTIMIZERS._own, "rmsprop", RMSprop)
    theta, algorithm = torch.ones(3, 3, dtype=torch.float64), Algorithm(RMSprop(decay=0.4), absent="remember")
    here, there = (
        unroll_and_grad(
            *(f, theta, algorithm, OUTER_LOSSES.make("path"), adjoint), runs=["a"], models=[f.initial_model("a")]
        )[0]
        for f in (simulated(flaky()), remote(flaky()))
    )
    assert there.loss == pytest.approx(here.loss, rel=1e-12)
    torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-9, atol=1e-12)


def test_learned_weights() -> None:
    env = flaky()
    learning = Learning(iterations=3, lr=0.1, adjoint="exact", step_sizes="learned")
    here, there = (learn(f, 3, learning=learning) for f in (simulated(env), remote(env)))
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=1e-12)
    assert there.settings["algorithm"]["step_sizes"] == pytest.approx(here.settings["algorithm"]["step_sizes"])


# --- sampled clients ---------------------------------------------------------------------------------------

MANY = {"a": 7, "b": 4, "c": 9, "d": 5, "e": 8, "f": 6}


RULES = [
    size(),
    uniform(),
    dr(),
    dr(loss="start"),
    fedadp(),
    fedfa(),
    feddisco(),
    q_fedavg(),
    afl(),
    fedawa(lr=0.2),
    online_hypergradient(step_size=0.3),
]


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_sampled_clients_give_the_simulations_numbers(rule: WeightingRule, absent: Any) -> None:
    env = tiny(MANY, clients_per_round=3, participation_probability=0.7, seed=1)
    algorithm = Algorithm(nova(), absent=absent)
    here, there = (run_rounds(f, rule, 3, algorithm=algorithm)[0] for f in (simulated(env), remote(env)))
    assert torch.equal(here.participated, there.participated)
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_a_server_that_reads_every_layer_of_every_update(absent: Any) -> None:
    env = tiny(MANY, clients_per_round=3, participation_probability=0.7, seed=1)
    algorithm = Algorithm(server=fedlws(beta=1.0, max_tau=9.0), absent=absent)
    here, there = (run_rounds(f, size(), 3, algorithm=algorithm)[0] for f in (simulated(env), remote(env)))
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_gradients_with_sampled_clients(adjoint: AdjointKind, absent: Any) -> None:
    env = tiny(MANY, clients_per_round=3, participation_probability=0.7, seed=1)
    theta = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    algorithm, outer = Algorithm(nova(), absent=absent), OUTER_LOSSES.make("balanced")
    here, there = (
        unroll_and_grad(f, theta, algorithm, outer, adjoint, runs=["learn-0"], models=[f.initial_model("learn-0")])[0]
        for f in (simulated(env), remote(env))
    )
    assert there.loss == pytest.approx(here.loss, rel=1e-12)
    torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
@pytest.mark.parametrize("sampler", ["by-size", "importance", "power-of-choice:candidates=5", "round-robin"])
def test_every_sampler_draws_the_simulations_cohorts(sampler: str, absent_loss: Any) -> None:
    """By what clients report over the network: the same losses and norms lead to the same cohorts."""
    env = tiny(MANY, rounds=8, clients_per_round=2, participation_probability=0.8, seed=1, client_sampler=sampler)
    cohorts: list[list[bool]] = []

    def weigh(report: ClientUpdates, state: None) -> tuple[Tensor, None]:
        cohorts.append(report.cohort.tolist())
        return size_shares(report), None

    algorithm = Algorithm(nova(), absent="drop", absent_loss=absent_loss)
    here, there = (
        run_rounds(f, Rule("watching", weigh), 8, algorithm=algorithm)[0] for f in (simulated(env), remote(env))
    )
    assert cohorts[:8] == cohorts[8:]
    assert len(set(map(tuple, cohorts))) > 2
    assert torch.equal(here.participated, there.participated)
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("sampler", ["importance", "power-of-choice"])
def test_gradients_with_cohorts_by_what_clients_reported(adjoint: AdjointKind, sampler: str) -> None:
    env = tiny(MANY, clients_per_round=3, participation_probability=0.7, seed=1, client_sampler=sampler)
    theta = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    outer = OUTER_LOSSES.make("balanced")
    here, there = (
        unroll_and_grad(f, theta, Algorithm(nova()), outer, adjoint, runs=["a"], models=[f.initial_model("a")])[0]
        for f in (simulated(env), remote(env))
    )
    assert there.loss == pytest.approx(here.loss, rel=1e-12)
    torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
def test_a_client_that_is_not_sampled_gets_no_message(absent_loss: Any) -> None:
    env = tiny(MANY, clients_per_round=3, participation_probability=0.5, seed=1)
    transport = InProcess(env)
    federation = RemoteFederation(transport, env, mlp(env), simulated(env).evaluate, dtype=torch.float64)
    run_rounds(federation, dr(), 3, algorithm=Algorithm(absent_loss=absent_loss))
    for t in range(3):
        taking_part = participation(env, "trial-0", t)
        assert taking_part.cohort.sum() == 3
        chosen = taking_part.cohort if absent_loss == "evaluate" else taking_part.participating
        expected = [key for key, sampled in zip(MANY, chosen, strict=True) if sampled]
        assert [key for key, _, round in transport.received if round == t] == expected


# --- what travels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["optimizer", "outer"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "elsewhere"}, "this client has no .* 'elsewhere', which the server uses; install the package"),
        ({"mu": 1.0}, "must be a name and settings"),
        ("sgd", "must be a name and settings"),
        ({"name": ["sgd"]}, "must be a name and settings"),
    ],
)
def test_a_part_that_a_client_does_not_know(field: str, given: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"TrainInstruction: field {field}: {message}"):
        TrainInstruction(**INSTRUCTION | {field: given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "prox", "rho": 1.0}, "local optimiser 'prox' has no setting 'rho'; it takes mu"),
        ({"name": "prox", "mu": "much"}, "local optimiser 'prox' cannot be made"),
        ({"name": "prox", "mu": -1}, "prox needs a finite mu >= 0"),
    ],
)
def test_settings_that_a_part_does_not_take(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainInstruction(**INSTRUCTION | {"optimizer": given})


INSTRUCTION: dict[str, Any] = {
    "run": "trial-0",
    "round": 0,
    "seed": 0,
    "lr": 0.1,
    "batch_size": 1,
    "epochs": 1,
    "optimizer": {"name": "sgd"},
}


@pytest.mark.parametrize("message_type", ["train", "vjp"])
def test_vectors_of_a_local_optimiser_reach_the_clients(message_type: MessageType) -> None:
    """Through Flower's records, to every client that trains, beside what the server works out itself."""
    federation, env = remote(tiny()), tiny()
    model, vector = federation.initial_model("a"), torch.arange(4, dtype=torch.float64)
    sent = TrainRequest("a", 0, model, nova(), broadcast=Broadcast(extras={"control": vector, "more": 2 * model}))
    adjoints = dict.fromkeys(env.load().keys, model)
    messages = federation._messages(message_type, sent, list(adjoints), adjoints)
    plain = federation._messages(message_type, replace(sent, broadcast=None), list(adjoints), adjoints)
    assert set(messages) == set(env.load().keys)
    for key, message in messages.items():
        instruction, arrays = read_instruction(instruction_record(*message))
        received = instruction.request(arrays["model"], arrays).broadcast
        assert received is not None and set(received.extras) == {"control", "more"}
        assert torch.equal(received.extras["control"], vector) and torch.equal(received.extras["more"], 2 * model)
        assert instruction == plain[key][0] and received.step_scale == plain[key][0].step_scale != 1.0


# --- clients that answer badly -----------------------------------------------------------------------------


def poisoned(reply: ClientReply, name: str, value: Tensor) -> ClientReply:
    return replace(reply, arrays={**reply.arrays, name: value})


BAD: dict[str, Callable[[ClientReply], ClientReply | str | None]] = {
    "no answer": lambda reply: None,
    "failed": lambda reply: "the client app raised an error",
    "a NaN": lambda reply: poisoned(reply, "updates", torch.full_like(reply.arrays["updates"], float("nan"))),
    "another shape": lambda reply: poisoned(reply, "updates", torch.zeros(3, dtype=torch.float64)),
    "whole numbers": lambda reply: poisoned(reply, "updates", torch.zeros_like(reply.arrays["updates"]).long()),
    "one array more": lambda reply: poisoned(reply, "more", torch.zeros(3)),
    "an array less": lambda reply: replace(reply, arrays={}),
    "another number": lambda reply: replace(reply, metrics={**reply.metrics, "num-examples": 1e9}),
    "another type": lambda reply: poisoned(reply, "updates", reply.arrays["updates"].float()),
    "far too large": lambda reply: poisoned(reply, "updates", torch.full_like(reply.arrays["updates"], 1e308)),
    "NaN for a number": lambda reply: replace(reply, metrics={**reply.metrics, "outer_loss": float("nan")}),
    "a negative loss": lambda reply: replace(reply, metrics={**reply.metrics, "outer_loss": -1.0}),
    "infinite": lambda reply: replace(reply, metrics={**reply.metrics, "outer_loss": float("inf")}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_makes_its_client_absent(kind: str) -> None:
    """In round 1, and only there; the run continues, as if the client had been absent."""
    env = tiny()

    def spoil(key: str, message_type: MessageType, t: int, reply: ClientReply) -> ClientReply | str | None:
        return BAD[kind](reply) if (key, message_type, t) == ("b", "train", 1) else reply

    federation = remote(env, spoil)
    (result,) = run_rounds(federation, size(), 3, algorithm=Algorithm(absent="drop"))
    assert result.participated.tolist() == [[True] * 3, [True, False, True], [True] * 3]
    assert result.model.isfinite().all()
    reason = kind if kind in ("no answer", "failed") else "rejected"
    assert federation.failures.as_dict() == {"b": {reason: 1}}
    rejected = [(entry.round, entry.client) for entry in result.rejected]
    assert rejected == ([(1, "b")] if reason == "rejected" else []), "one that does not answer is only absent"


@pytest.mark.parametrize("optimizer", [nova(), accumulated(prox(0.3))], ids=lambda optimizer: optimizer.name)
def test_the_exact_adjoint_is_of_the_round_that_was_run(optimizer: LocalOptimizer) -> None:
    """b is to train in round 1 and does not answer: the others' scales counted on it. By finite differences."""
    env = tiny()

    def spoil(key: str, message_type: MessageType, t: int, reply: ClientReply) -> ClientReply | None:
        return None if (key, message_type, t) == ("b", "train", 1) else reply

    federation = remote(env, spoil)
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    algorithm = Algorithm(optimizer, absent_loss="skip")

    def unfolded(at: Tensor) -> Any:
        start = federation.initial_model("learn-0")
        outer = OUTER_LOSSES.make("path")
        (found,) = unroll_and_grad(federation, at, algorithm, outer, "exact", runs=["learn-0"], models=[start])
        return found

    gradient, step = unfolded(theta).gradient, 1e-5
    for t, k in ((0, 0), (0, 2), (1, 0), (2, 1)):
        change = torch.zeros_like(theta)
        change[t, k] = step
        slope = (unfolded(theta + change).loss - unfolded(theta - change).loss) / (2 * step)
        assert float(gradient[t, k]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_layers_that_stay_with_the_clients_are_refused() -> None:
    env = tiny()
    with pytest.raises(InputError, match="layers that stay with the clients are simulated only"):
        run_rounds(remote(env), size(), 3, algorithm=method("fedper").algorithm)


def test_everybody_must_have_registered() -> None:
    env, fewer = tiny(), tiny({"a": 7, "b": 4})
    with pytest.raises(FederationError, match="client 'c' has not registered"):
        RemoteFederation(InProcess(fewer), env, mlp(env), SimulatedFederation(env).evaluate)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_buffers_and_dropout_travel(adjoint: AdjointKind) -> None:
    """Models whose training changes buffers and draws at random, client by client."""
    env = tiny({"a": 8, "b": 6, "c": 12}, batch_size=4, participation_probability=0.6, seed=3)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3))

    here = simulated(env, build)
    transport = InProcess(env)
    transport.clients = {key: replace(client, model=build) for key, client in transport.clients.items()}
    there = RemoteFederation(transport, env, build, here.evaluate, dtype=torch.float64)
    algorithm = Algorithm(nova(), adam(0.05), absent="remember", step_sizes=(0.5, 1.5))
    one, other = (run_rounds(federation, size(), 3, algorithm=algorithm)[0].model for federation in (here, there))
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    learning = Learning(iterations=2, adjoint=adjoint, outer="balanced")
    mine, theirs = (learn(federation, 3, learning=learning) for federation in (here, there))
    torch.testing.assert_close(theirs.weights, mine.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_one_far_too_large_is_rejected_alike(adjoint: AdjointKind) -> None:
    """In both engines: runs, gradients, and who is named."""
    env = tiny(dict.fromkeys("abcdef", 9), epochs=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300
    algorithm = Algorithm(nova(), absent="remember", filter="norm")
    theta = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    runs, gradients = [], []
    for federation in (simulated(env), remote(env)):
        runs += run_rounds(federation, fedadp(), 2, algorithm=algorithm)
        start = federation.initial_model("learn-0")
        outer = OUTER_LOSSES.make("path")
        gradients += unroll_and_grad(federation, theta, algorithm, outer, adjoint, runs=["learn-0"], models=[start])
    assert runs[0].rejected == runs[1].rejected
    assert [entry.client for entry in runs[0].rejected] == ["f", "f"]
    torch.testing.assert_close(runs[1].model, runs[0].model, rtol=1e-9, atol=1e-12)
    assert gradients[1].loss == pytest.approx(gradients[0].loss, rel=1e-12)
    torch.testing.assert_close(gradients[1].gradient, gradients[0].gradient, rtol=1e-9, atol=1e-12)
