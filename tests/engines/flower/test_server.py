"""Clients asked one by one give the numbers of the simulation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.task import OuterLoss, OuterName
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, MessageType, TrainInstruction
from fedunfold.engines.flower.server import Answers, RemoteFederation
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local.optimizers import LocalOptimizer, accumulated, nova, prox, sgd
from fedunfold.rules import dr, fedadp, fedfa, size
from fedunfold.rules.rule import WeightingRule
from fedunfold.server.optimizers import adam
from fedunfold.training.loop import Algorithm, run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from tests.support.federations import mlp, simulated, tiny


class Hands:
    """A channel that hands every message to the site itself; `spoil` changes or loses an answer."""

    def __init__(
        self,
        env: Environment,
        spoil: Callable[[str, MessageType, int, ClientReply], ClientReply | str | None] | None = None,
    ):
        data = env.load()
        self.sites = {
            key: LocalClient(key, *data.client(k), data.classes, mlp(env), torch.float64)
            for k, key in enumerate(data.keys)
        }
        self.spoil = spoil

    def registrations(self) -> Sequence[ClientDescription]:
        return [site.register() for site in self.sites.values()]

    def ask(self, verb: MessageType, messages: Mapping[str, tuple[TrainInstruction, Arrays]]) -> Answers:
        answers: dict[str, ClientReply | str] = {}
        for key, (assignment, arrays) in messages.items():
            answer: ClientReply | str | None = getattr(self.sites[key], verb)(assignment, arrays)
            if self.spoil is not None and isinstance(answer, ClientReply):
                answer = self.spoil(key, verb, assignment.round, answer)
            if answer is not None:
                answers[key] = answer
        return answers


def remote(env: Environment, *spoil: Any) -> RemoteFederation:
    return RemoteFederation(Hands(env, *spoil), env, mlp(env), simulated(env).evaluate, dtype=torch.float64)


def flaky(**settings: Any) -> Environment:
    return tiny(participation_probability=0.6, seed=3, **settings)


UPDATES = [sgd(), prox(0.3), nova(), accumulated(prox(0.3))]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.name)
@pytest.mark.parametrize("rule", [size(), dr(), fedadp(), fedfa()], ids=lambda rule: rule.name)
def test_runs(update: LocalOptimizer, rule: WeightingRule) -> None:
    env = flaky()
    algorithm = Algorithm(update, absent="remember")
    here, there = (run_rounds(f, rule, 3, algorithm=algorithm) for f in (simulated(env), remote(env)))
    assert torch.equal(here.present, there.present)
    assert not here.present.all()
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(there.model, here.model, rtol=1e-9, atol=1e-12)
    assert there.accuracies == here.accuracies


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.name)
@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
def test_gradients(adjoint: AdjointKind, update: LocalOptimizer, absent_loss: Any) -> None:
    env = flaky()
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    algorithm = Algorithm(update, absent="remember", absent_loss=absent_loss)
    outers: list[OuterName] = ["path", "balanced", "final-balanced", "mse"]
    for outer in outers:
        found = []
        for federation in (simulated(env), remote(env)):
            start = federation.initial_model("learn-0")
            found.append(unfold(federation, theta, algorithm, OuterLoss(outer), adjoint, run="learn-0", model=start))
        here, there = found
        assert there.loss == pytest.approx(here.loss, rel=1e-12)
        torch.testing.assert_close(there.gradient, here.gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(there.step_gradient, here.step_gradient, rtol=1e-9, atol=1e-12)


def test_learned_weights() -> None:
    env = flaky()
    learning = Learning(iterations=3, lr=0.1, adjoint="exact", step_sizes="learned")
    here, there = (learn(f, 3, learning=learning) for f in (simulated(env), remote(env)))
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-9, atol=1e-12)
    assert there.settings["algorithm"]["step_sizes"] == pytest.approx(here.settings["algorithm"]["step_sizes"])


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
    """In round 1, and only there; the run goes on, as if the client had been away."""
    env = tiny()

    def spoil(key: str, verb: MessageType, round: int, reply: ClientReply) -> ClientReply | str | None:
        return BAD[kind](reply) if (key, verb, round) == ("b", "train", 1) else reply

    federation = remote(env, spoil)
    result = run_rounds(federation, size(), 3, algorithm=Algorithm(absent="drop"))
    assert result.present.tolist() == [[True] * 3, [True, False, True], [True] * 3]
    assert result.model.isfinite().all()
    reason = kind if kind in ("no answer", "failed") else "set aside"
    assert federation.faults.as_dict() == {"b": {reason: 1}}
    rejected = [(entry.round, entry.client) for entry in result.rejected]
    assert rejected == ([(1, "b")] if reason == "set aside" else []), "one that is silent is only absent"


@pytest.mark.parametrize("update", [nova(), accumulated(prox(0.3))], ids=lambda update: update.name)
def test_the_exact_adjoint_walks_back_the_round_that_was_run(update: LocalOptimizer) -> None:
    """b is asked in round 1 and silent: the others' scales counted on it. By finite differences."""
    env = tiny()

    def spoil(key: str, verb: MessageType, round: int, reply: ClientReply) -> ClientReply | None:
        return None if (key, verb, round) == ("b", "train", 1) else reply

    federation = remote(env, spoil)
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    algorithm = Algorithm(update, absent_loss="skip")

    def unfolded(at: Tensor) -> Any:
        start = federation.initial_model("learn-0")
        return unfold(federation, at, algorithm, OuterLoss(), "exact", run="learn-0", model=start)

    gradient, step = unfolded(theta).gradient, 1e-5
    for t, k in ((0, 0), (0, 2), (1, 0), (2, 1)):
        change = torch.zeros_like(theta)
        change[t, k] = step
        slope = (unfolded(theta + change).loss - unfolded(theta - change).loss) / (2 * step)
        assert float(gradient[t, k]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_everybody_must_have_registered() -> None:
    env, fewer = tiny(), tiny({"a": 7, "b": 4})
    with pytest.raises(InputError, match="client 'c' has not registered"):
        RemoteFederation(Hands(fewer), env, mlp(env), SimulatedFederation(env).evaluate)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_running_statistics_and_dropout_travel(adjoint: AdjointKind) -> None:
    """Models whose training moves statistics and draws at random, asked one by one."""
    env = tiny({"a": 8, "b": 6, "c": 12}, batch_size=4, participation_probability=0.6, seed=3)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3))

    here = simulated(env, build)
    hands = Hands(env)
    hands.sites = {key: replace(site, model=build) for key, site in hands.sites.items()}
    there = RemoteFederation(hands, env, build, here.evaluate, dtype=torch.float64)
    algorithm = Algorithm(nova(), adam(0.05), absent="remember", step_sizes=(0.5, 1.5))
    one, other = (run_rounds(federation, size(), 3, algorithm=algorithm).model for federation in (here, there))
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
    learning = Learning(iterations=2, adjoint=adjoint, outer="balanced")
    mine, theirs = (learn(federation, 3, learning=learning) for federation in (here, there))
    torch.testing.assert_close(theirs.weights, mine.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_one_far_too_long_is_set_aside_alike(adjoint: AdjointKind) -> None:
    """In both engines: runs, gradients, and who is named."""
    env = tiny(dict.fromkeys("abcdef", 9), epochs=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300
    algorithm = Algorithm(nova(), absent="remember", screen="norm")
    theta = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    runs, gradients = [], []
    for federation in (simulated(env), remote(env)):
        runs.append(run_rounds(federation, fedadp(), 2, algorithm=algorithm))
        start = federation.initial_model("learn-0")
        gradients.append(unfold(federation, theta, algorithm, OuterLoss(), adjoint, run="learn-0", model=start))
    assert runs[0].rejected == runs[1].rejected
    assert [entry.client for entry in runs[0].rejected] == ["f", "f"]
    torch.testing.assert_close(runs[1].model, runs[0].model, rtol=1e-9, atol=1e-12)
    assert gradients[1].loss == pytest.approx(gradients[0].loss, rel=1e-12)
    torch.testing.assert_close(gradients[1].gradient, gradients[0].gradient, rtol=1e-9, atol=1e-12)
