"""Both adjoints in float64 against autograd through the fully unrolled run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedunfold import server
from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.messages import AbsentLoss, ClientUpdates, Metric, TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer, ServerOptimizer, State
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import accumulated, adamw, clipped, decayed, feddyn, momentum, nova, prox, scaffold, sgd
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.federations import participation
from tests.support.outside_package.outside_parts import RMSprop
from tests.support.unrolled import Unrolled, gradients_of

SIZES = {"a": 7, "b": 4, "c": 9, "d": 5}
EPOCHS: dict[str, int | tuple[int, ...]] = {"a": 1, "b": (2, 1, 3), "c": 1, "d": 2}
RUN = "learn-0"
TOLERANCE = 1e-9

OUTER = ["path", "sample", "balanced", "final", "final-balanced", "every-round", "mse"]
LOCAL: dict[str, LocalOptimizer] = {
    "sgd": sgd(),
    "prox": prox(0.5),
    "nova": nova(),
    "accumulated": accumulated(sgd()),
    "accumulated-prox": accumulated(prox(0.5)),
}


@dataclass(frozen=True)
class Anchored(LocalOptimizer):
    """Its state begins at w^(t), and its steps pull towards half of it."""

    name: ClassVar[str] = "anchored"

    def init(self, params: Tensor) -> State:
        return (0.5 * params,)

    def step(self, params: Tensor, gradient: Tensor, state: State, lr: Tensor, anchor: Tensor) -> tuple[Tensor, State]:
        return params - lr * (gradient + params - state[0] + 0.3 * anchor), (0.9 * state[0] + 0.1 * params,)


STATEFUL: dict[str, LocalOptimizer] = {
    "momentum": momentum(0.6),
    "accumulated-momentum": accumulated(momentum(0.6)),
    "adamw": adamw(eps=0.01, weight_decay=0.4),
    "adamw-without-decay": adamw(beta1=0.5, eps=0.01, weight_decay=0.0),
    "decayed": decayed(momentum(0.6), weight_decay=0.3),
    "clipped": clipped(sgd(), max_norm=0.3),
    "clipped-adamw": clipped(adamw(eps=0.01), max_norm=0.3),
    "rmsprop": RMSprop(decay=0.4),
    "anchored": Anchored(),
    "scaffold": scaffold(),
    "feddyn": feddyn(0.8),
}
ABSENT: tuple[Absent, ...] = ("keep", "drop", "remember")
ABSENT_LOSS: tuple[AbsentLoss, ...] = ("evaluate", "skip")
PARTICIPATION = [("keep", "all", "evaluate")] + [
    (absent, "some", absent_loss) for absent, absent_loss in product(ABSENT, ABSENT_LOSS)
]


def federation_of(shape: tuple[int, ...], who: str) -> Environment:
    """Four clients with unequal steps and short minibatches; with `some`, one of three rounds has nobody."""
    stream = np.random.default_rng(1)
    clients = {
        key: (stream.normal(size=(n, *shape)), np.arange(n) % 3 if key != "b" else np.zeros(n, int))
        for key, n in SIZES.items()
    }
    test = stream.normal(size=(6, *shape)), np.arange(6) % 3
    env = Environment.from_arrays(
        clients,
        test,
        epochs=EPOCHS,
        participation_probability=1.0 if who == "all" else 0.5,
        model=(4,),
        rounds=3,
        batch_size=3,
        lr=0.3,
    )
    if who == "all":
        return env
    for seed in range(1000):
        drawn = env.replace(seed=seed)
        here = [participation(drawn, RUN, t).participating.sum() for t in range(3)]
        if here[1] == 0 and 0 < here[0] < 4 and 0 < here[2] < 4:
            return drawn
    raise AssertionError("no seed leaves exactly the middle round empty")


class Noting(SimulatedFederation):
    """What clients had last reported is noted for every round."""

    def __init__(self, env: Environment, **more: Any) -> None:
        super().__init__(env, **more)
        self.reported: list[Mapping[Metric, Tensor]] = []

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        self.reported.append(requests[0].reported)
        return super().train(requests)


def relative_error(
    env: Environment,
    model: ModelFactory,
    algorithm: Algorithm,
    outer: str,
    adjoint: AdjointKind,
    memory_budget: int = 2**20,
    rejected: frozenset[tuple[int, int]] = frozenset(),
) -> float:
    """The larger of those of dL/dθ and dL/ds, at step sizes that are not 1."""
    algorithm = replace(algorithm, step_sizes=(0.7, 1.6, 1.2))
    federation = Noting(env, model=model, dtype=torch.float64, memory_budget=memory_budget)
    start = federation.initial_model(RUN)
    theta = torch.from_numpy(np.random.default_rng(2).uniform(0.3, 1.0, (env.rounds, len(SIZES))))
    parts = (federation, theta, algorithm, OUTER_LOSSES.make(outer), adjoint)
    (ours,) = unroll_and_grad(*parts, runs=[RUN], models=[start])
    assert {(entry.round, list(SIZES).index(entry.client)) for entry in ours.rejected} == rejected
    unrolled = Unrolled(env, model(), algorithm, outer, first_order=adjoint == "first_order")
    unrolled.rejected, unrolled.reported = rejected, federation.reported
    loss, *gradients = gradients_of(unrolled, theta, start, RUN)
    assert ours.loss == pytest.approx(loss, rel=1e-12)
    errors = []
    for mine, gradient in zip((ours.gradient, ours.step_gradient), gradients, strict=True):
        assert float(gradient.norm()) > 1e-6, "a vanishing gradient would prove nothing"
        errors.append(float((mine - gradient).norm() / gradient.norm()))
    return max(errors)


def mlp(env: Environment) -> ModelFactory:
    return model_factory(env.model, (5,), 3)


@pytest.mark.parametrize("optimizer", [server.sgd(), server.adam(0.05)], ids=["sgd", "adam"])
@pytest.mark.parametrize("who", PARTICIPATION, ids="-".join)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_mlp(adjoint: AdjointKind, local: str, who: tuple[Absent, str, AbsentLoss], optimizer: ServerOptimizer) -> None:
    absent, participating, absent_loss = who
    env = federation_of((5,), participating)
    for outer in OUTER:
        algorithm = Algorithm(LOCAL[local], optimizer, absent, absent_loss)
        assert relative_error(env, mlp(env), algorithm, outer, adjoint) <= TOLERANCE, outer


def small_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.GroupNorm(1, 2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * 2 * 2, 3),
    )


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_convolution(adjoint: AdjointKind, local: str, absent: Absent) -> None:
    env = federation_of((1, 4, 4), "some")
    algorithm = Algorithm(LOCAL[local], absent=absent)
    assert SimulatedFederation(env, model=small_convolution).kernel == "ModuleKernel"
    for outer in OUTER:
        assert relative_error(env, small_convolution, algorithm, outer, adjoint) <= TOLERANCE, outer


def normalised_with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.Tanh(),
        nn.Dropout2d(0.3),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * 2 * 2, 3),
    )


@pytest.mark.parametrize("optimizer", [server.sgd(), server.adam(0.05)], ids=["sgd", "adam"])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_running_statistics_and_dropout(
    adjoint: AdjointKind, local: str, absent: Absent, optimizer: ServerOptimizer
) -> None:
    """Statistics are averaged with Θ and have no gradient; dropout is the same when a round is met again."""
    env = federation_of((1, 4, 4), "some")
    algorithm = Algorithm(LOCAL[local], optimizer, absent)
    for outer in ("path", "balanced", "final"):
        assert relative_error(env, normalised_with_dropout, algorithm, outer, adjoint) <= TOLERANCE, outer


@pytest.mark.parametrize("local", LOCAL | STATEFUL)
def test_checkpoints_inside_a_round_change_nothing(local: str) -> None:
    env = federation_of((5,), "all")
    algorithm = Algorithm((LOCAL | STATEFUL)[local])
    assert relative_error(env, mlp(env), algorithm, "balanced", "exact", memory_budget=0) <= TOLERANCE


def test_deep_stack_without_biases() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)
        )

    env = federation_of((5,), "all")
    assert SimulatedFederation(env, model=deep).kernel == "MLPKernel"
    assert relative_error(env, deep, Algorithm(prox(0.2)), "mse", "exact") <= TOLERANCE


def test_both_kernels_agree() -> None:
    """The same stack, hidden from the fast path by a module around it."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(env)()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    env = federation_of((5,), "some")
    theta = torch.ones(3, 4, dtype=torch.float64)
    found = []
    for model in (mlp(env), Wrapped):
        federation = SimulatedFederation(env, model=model, dtype=torch.float64)
        start = federation.initial_model(RUN)
        parts = (federation, theta, Algorithm(nova(), server.adam(), "remember"), OUTER_LOSSES.make("balanced"))
        found += unroll_and_grad(*parts, "exact", runs=[RUN], models=[start])
    torch.testing.assert_close(found[0].gradient, found[1].gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[0].model, found[1].model, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("absent", ABSENT)
def test_through_the_servers_momentum(absent: Absent) -> None:
    env = federation_of((5,), "some")
    algorithm = Algorithm(server=server.momentum(0.7, lr=0.8), absent=absent)
    for adjoint in get_args(AdjointKind):
        assert relative_error(env, mlp(env), algorithm, "path", adjoint) <= TOLERANCE


def test_through_the_servers_learning_rate() -> None:
    env = federation_of((5,), "some")
    for adjoint in get_args(AdjointKind):
        assert relative_error(env, mlp(env), Algorithm(server=server.sgd(0.6)), "path", adjoint) <= TOLERANCE


@pytest.mark.parametrize("model", ["mlp", "convolution", "normalised"])
@pytest.mark.parametrize("absent", ABSENT)
def test_through_layers_that_shrink(absent: Absent, model: str) -> None:
    """Strongly, by factors within their bounds and at them."""
    env = federation_of((5,) if model == "mlp" else (1, 4, 4), "some")
    build = {"mlp": mlp(env), "convolution": small_convolution, "normalised": normalised_with_dropout}[model]
    for optimizer in (server.fedlws(beta=0.6, min_tau=0.0, max_tau=9.0), server.fedlws(beta=1.0, max_tau=0.3)):
        algorithm = Algorithm(momentum(0.6), optimizer, absent)
        for adjoint in get_args(AdjointKind):
            assert relative_error(env, build, algorithm, "balanced", adjoint) <= TOLERANCE


# --- any local optimiser -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "convolution", "normalised"])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("local", STATEFUL)
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_local_optimizers_with_state(adjoint: AdjointKind, local: str, absent: Absent, model: str) -> None:
    """Through their steps and their state; first order leaves out the curvature of the loss and nothing else."""
    env = federation_of((5,) if model == "mlp" else (1, 4, 4), "some")
    build = {"mlp": mlp(env), "convolution": small_convolution, "normalised": normalised_with_dropout}[model]
    algorithm = Algorithm(STATEFUL[local], server.adam(0.05), absent)
    for outer in ("path", "balanced", "final", "mse"):
        assert relative_error(env, build, algorithm, outer, adjoint) <= TOLERANCE, outer


def test_first_order_and_exact_differ_for_any_of_them() -> None:
    env = federation_of((5,), "all")
    for optimizer in (*LOCAL.values(), *STATEFUL.values()):
        federation = SimulatedFederation(env, dtype=torch.float64)
        parts = (federation, torch.ones(3, 4, dtype=torch.float64), Algorithm(optimizer), OUTER_LOSSES.make("path"))
        start = federation.initial_model(RUN)
        found = [unroll_and_grad(*parts, kind, runs=[RUN], models=[start])[0] for kind in get_args(AdjointKind)]
        assert float((found[0].gradient - found[1].gradient).norm()) > 1e-3 * float(found[1].gradient.norm())


# --- sampled cohorts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reachable", [1.0, 0.6])
@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("local", ["sgd", "prox", "nova", "momentum", "scaffold", "feddyn"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_sampled_cohorts(adjoint: AdjointKind, local: str, absent: Absent, reachable: float) -> None:
    """Weights are normalised over the cohort; absences within it, where clients cannot always be reached."""
    env = federation_of((5,), "all").replace(clients_per_round=2)
    if reachable < 1:
        clients = [client.model_copy(update={"participation_probability": reachable}) for client in env.clients]
        env = env.replace(clients=clients, seed=3)
        absences = [participation(env, RUN, t).absent.sum() for t in range(3)]
        assert 0 < sum(absences) < 6
    for outer, absent_loss in (("path", "evaluate"), ("balanced", "evaluate"), ("path", "skip")):
        algorithm = Algorithm((LOCAL | STATEFUL)[local], absent=absent, absent_loss=absent_loss)  # type: ignore[arg-type]
        assert relative_error(env, mlp(env), algorithm, outer, adjoint) <= TOLERANCE, (outer, absent_loss)


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("sampler", ["by-size", "importance", "power-of-choice:candidates=3", "round-robin"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_cohorts_by_other_samplers(adjoint: AdjointKind, sampler: str, absent: Absent) -> None:
    """Who is sampled counts as a constant, also where it depends on the updates of earlier rounds."""
    env = federation_of((5,), "all").replace(clients_per_round=2, client_sampler=sampler, seed=2)
    for outer in ("path", "balanced", "every-round"):
        assert relative_error(env, mlp(env), Algorithm(nova(), absent=absent), outer, adjoint) <= TOLERANCE, outer


@pytest.mark.parametrize("absent", ABSENT)
def test_sampled_cohorts_under_an_adaptive_server(absent: Absent) -> None:
    env = federation_of((5,), "all").replace(clients_per_round=3)
    for adjoint in get_args(AdjointKind):
        algorithm = Algorithm(nova(), server.adam(0.05), absent)
        assert relative_error(env, mlp(env), algorithm, "balanced", adjoint) <= TOLERANCE


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("local", ["sgd", "prox", "nova", "accumulated", "feddyn"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_a_rejected_client_has_no_part_in_the_gradient(adjoint: AdjointKind, local: str, absent: Absent) -> None:
    """c's features are far too large. In the first round four clients are no range yet, from then on c is rejected:
    its update, its losses along the path and what the server would remember of it; τ_eff stays that of all four. Under
    FedDyn everybody's second step is large by its h, and c is rejected in the third round alone."""
    env = federation_of((5,), "all")
    data = env.load()
    data.x[data.offsets[2] : data.offsets[3]] *= 40
    algorithm = Algorithm((LOCAL | STATEFUL)[local], server.adam(0.05), absent, filter="norm")
    rejected = frozenset({(2, 2)} if local == "feddyn" else {(1, 2), (2, 2)})
    for outer in ("path", "balanced", "final"):
        assert relative_error(env, mlp(env), algorithm, outer, adjoint, rejected=rejected) <= TOLERANCE, outer


@pytest.mark.parametrize("local", ["nova", "scaffold", "feddyn"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_one_that_diverges_alone_has_no_part_in_the_gradient(adjoint: AdjointKind, local: str) -> None:
    """Where c's large features lead in one step, the model has no finite output, in every round."""
    env = federation_of((5,), "all")
    data = env.load()
    data.x[data.offsets[2] : data.offsets[3]] *= 40
    rejected = frozenset((t, 2) for t in range(3))
    for outer in ("final", "path"):
        algorithm = Algorithm((LOCAL | STATEFUL)[local])
        error = relative_error(env, Overflowing, algorithm, outer, adjoint, rejected=rejected)
        assert error <= TOLERANCE, outer


class Overflowing(nn.Module):
    """Infinite where its weights are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out * torch.where(self.inner.weight.detach().abs().max() > 3, torch.inf, 1.0)
