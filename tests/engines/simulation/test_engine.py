"""What one round of the simulation reports."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.participation import epochs_at
from fedunfold.core.parts import LocalOptimizer
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import accumulated, momentum, nova, prox, sgd
from fedunfold.rules import dr, fedadp
from fedunfold.server import adam
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.outer_loss import Balanced, Final, Path, Sample
from tests.support.federations import (
    CLASSES,
    RUN,
    Plain,
    Trained,
    assert_same,
    convolution,
    mlp,
    simulated,
    tiny,
    train,
)

RHO, MU = 0.6, 0.5
LOCAL: dict[str, tuple[LocalOptimizer, dict[str, float]]] = {
    "sgd": (sgd(), {}),
    "prox": (prox(MU), {"mu": MU}),
    "nova": (nova(), {}),
    "momentum": (momentum(RHO), {"rho": RHO}),
}
with_every_update = pytest.mark.parametrize("name", LOCAL)


def sometimes(shape: tuple[int, ...] = (5,)) -> Environment:
    """Client b is absent in round 0."""
    env = tiny(shape=shape, participation_probability={"a": 1.0, "b": 0.0, "c": 1.0})
    assert Plain(env, mlp(env)).participated(0) == [True, False, True]
    return env


def trained(env: Environment, name: str, build: ModelFactory | None = None) -> tuple[Tensor, dict[int, Trained]]:
    """w^(0), and the present clients' local training from it in plain PyTorch."""
    plain = Plain(env, build or mlp(env))
    start = simulated(env, build).initial_model(RUN)
    steps = plain.steps(0)
    effective = sum(share * n for share, n in zip(plain.shares, steps, strict=True))
    there = [k for k, here in enumerate(plain.participated(0)) if here]
    scales = {k: effective / steps[k] if name == "nova" else 1.0 for k in there}
    return start, {k: plain.train(start, 0, k, scale=scales[k], **LOCAL[name][1]) for k in there}


def stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- reports -----------------------------------------------------------------------------------------------


@with_every_update
@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_updates_losses_and_gradients(name: str, build: ModelFactory | None) -> None:
    env = sometimes((5,) if build is None else (1, 4, 4))
    start, clients = trained(env, name, build)
    report = train(simulated(env, build), "loss", "gradients", optimizer=LOCAL[name][0])
    assert report.round == 0
    assert report.client_ids == ("a", "b", "c")
    assert report.num_examples.tolist() == [7, 4, 9]
    assert report.participated.tolist() == [True, False, True]
    assert report.num_steps.tolist() == [3, 0, 6]
    assert_same(report.updates.rows, stacked([client.model - start for client in clients.values()]))
    assert_same(report.metrics.gradients, stacked([client.gradient for client in clients.values()]))
    away = sum(Plain(env, build or mlp(env)).losses_at(start, 0, 1))
    assert_same(report.metrics.loss, vector(sum(clients[0].losses), away, sum(clients[2].losses)))


@pytest.mark.parametrize("base", ["sgd", "prox", "momentum"])
def test_accumulated_updates_are_rescaled_and_gradients_are_not(base: str) -> None:
    env = sometimes()
    start, clients = trained(env, base)
    report = train(simulated(env), "gradients", optimizer=accumulated(LOCAL[base][0]))
    factors: dict[str, list[float]] = {
        "sgd": [1.0] * 6,
        "prox": [0.85**i for i in range(6)],  # 1 − ημ = 1 − 0.3·0.5
        "momentum": [(1 - 0.6**i) / 0.4 for i in range(1, 7)],
    }
    norms = {steps: sum(factors[base][:steps]) for steps in (3, 6)}
    effective = 0.35 * norms[3] + 0.45 * norms[6]
    scales = {0: effective / norms[3], 2: effective / norms[6]}
    assert_same(report.updates.rows, stacked([scales[k] * (c.model - start) for k, c in clients.items()]))
    assert_same(report.metrics.gradients, stacked([client.gradient for client in clients.values()]))


def test_the_loss_of_those_away_may_be_skipped() -> None:
    env = sometimes()
    _, clients = trained(env, "sgd")
    report = train(simulated(env), "loss", "start_loss", absent_loss="skip")
    assert_same(report.metrics.loss, vector(sum(clients[0].losses), torch.nan, sum(clients[2].losses)), unknown=True)
    assert report.metrics.start_loss is not None
    assert report.metrics.start_loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_start_loss_is_the_mean_over_a_clients_samples(build: ModelFactory | None) -> None:
    env = sometimes((5,) if build is None else (1, 4, 4))
    plain = Plain(env, build or mlp(env))
    federation = simulated(env, build)
    module = plain.module(federation.initial_model(RUN))
    expected = []
    for k in range(3):
        x, y = plain.client(k)
        expected.append(nn.functional.cross_entropy(module(x), y).item())
    assert_same(train(federation, "start_loss").metrics.start_loss, vector(*expected))


@with_every_update
def test_accuracy_is_that_of_the_trained_model_on_its_own_data(name: str) -> None:
    env = sometimes()
    plain = Plain(env, mlp(env))
    _, clients = trained(env, name)
    expected = vector(torch.nan, torch.nan, torch.nan)
    for k, client in clients.items():
        x, y = plain.client(k)
        expected[k] = (plain.module(client.model)(x).argmax(1) == y).double().mean()
    assert_same(train(simulated(env), "accuracy", optimizer=LOCAL[name][0]).metrics.accuracy, expected, unknown=True)


def test_only_what_was_asked_for_is_reported() -> None:
    report = train(simulated(tiny()))
    assert (report.metrics.loss, report.metrics.start_loss, report.metrics.accuracy, report.metrics.gradients) == (
        None,
        None,
        None,
        None,
    )
    assert report.outer.loss == 0
    assert report.outer.gradient is None


def test_nobody_there() -> None:
    env = tiny(participation_probability=0.0)
    federation = simulated(env)
    start = federation.initial_model(RUN)
    report = train(federation, "loss", "accuracy", "gradients", outer=Path())
    assert report.updates.rows.shape == (0, len(start))
    assert report.metrics.gradients is not None
    assert report.metrics.gradients.shape == (0, len(start))
    assert report.metrics.accuracy is not None
    assert report.metrics.accuracy.isnan().all()
    assert report.num_steps.tolist() == [0, 0, 0]
    at_start = [sum(Plain(env, mlp(env)).losses_at(start, 0, k)) for k in range(3)]
    assert_same(report.metrics.loss, vector(*at_start))
    assert report.outer.loss == pytest.approx(sum(at_start), rel=1e-12)
    silent = train(federation, "loss", outer=Path(), absent_loss="skip")
    assert silent.metrics.loss is not None
    assert silent.metrics.loss.isnan().all()
    assert silent.outer.loss == 0


@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
def test_outer_loss_along_the_way(absent_loss: str) -> None:
    env = sometimes()
    start, clients = trained(env, "sgd")
    away = sum(Plain(env, mlp(env)).losses_at(start, 0, 1)) if absent_loss == "evaluate" else 0.0
    met = {k: sum(client.losses) for k, client in clients.items()}
    path = train(simulated(env), outer=Path(), absent_loss=absent_loss)
    assert path.outer.loss == pytest.approx(met[0] + away + met[2], rel=1e-12)
    sample = train(simulated(env), outer=Sample(), absent_loss=absent_loss)
    assert sample.outer.loss == pytest.approx(met[0] + away / 2 + met[2] / 2, rel=1e-12)
    assert train(simulated(env), outer=Final(), absent_loss=absent_loss).outer.loss == 0


def test_the_last_layer_meets_all_clients_at_one_model() -> None:
    env = sometimes()
    federation = simulated(env)
    start = federation.initial_model(RUN)
    report = federation.outer_loss([TrainRequest(RUN, 3, start, sgd(), outer=Final())])[0]
    plain = Plain(env, mlp(env))
    expected = [sum(plain.losses_at(start, 3, k)) / epochs_at(env.clients[k].epochs, 3) for k in range(3)]
    assert report.loss == pytest.approx(sum(expected), rel=1e-12)
    assert report.gradient.shape == start.shape


def test_the_last_layer_needs_an_outer_loss() -> None:
    federation = simulated(tiny())
    with pytest.raises(InputError, match="names no outer loss"):
        federation.outer_loss([TrainRequest(RUN, 0, federation.initial_model(RUN), sgd())])[0]


def test_a_round_leaves_the_model_alone() -> None:
    federation = simulated(tiny())
    start = federation.initial_model(RUN)
    before = start.clone()
    federation.train([TrainRequest(RUN, 0, start, momentum(), required_metrics=frozenset({"gradients", "accuracy"}))])[
        0
    ]
    assert torch.equal(start, before)
    assert not start.requires_grad


def test_a_client_trains_the_same_alone() -> None:
    among = train(simulated(tiny()), "loss", "gradients")
    for k, key in enumerate(among.client_ids):
        alone = train(simulated(tiny({key: int(among.num_examples[k])})), "loss", "gradients")
        assert_same(alone.updates.rows[0], among.updates.rows[k])
        assert among.metrics.loss is not None
        assert_same(alone.metrics.loss, among.metrics.loss[k : k + 1])


def test_more_rows_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = sometimes()
    request: dict[str, Any] = {"outer": Balanced(), "path_gradient": True}
    whole = train(simulated(env), "loss", "start_loss", "accuracy", **request)
    monkeypatch.setattr("fedunfold.engines.simulation.evaluation.ROWS_AT_ONCE", {"cpu": 2})
    pieces = train(simulated(env), "loss", "start_loss", "accuracy", **request)
    for part in ("updates", "metrics", "outer"):
        for one, other in zip(vars(getattr(pieces, part)).values(), vars(getattr(whole, part)).values(), strict=True):
            if isinstance(other, Tensor):
                assert_same(one, other, 1e-12, unknown=True)
    assert_same(pieces.num_steps, whole.num_steps)
    assert_same(pieces.num_examples, whole.num_examples)
    assert pieces.outer.loss == pytest.approx(whole.outer.loss, rel=1e-12)
    model = simulated(env).initial_model(RUN)
    few = simulated(env).evaluate([model])[0]
    monkeypatch.undo()
    many = simulated(env).evaluate([model])[0]
    assert (few.score, few.loss) == pytest.approx((many.score, many.loss), rel=1e-12)


def test_clients_are_described() -> None:
    env = tiny()
    data = env.load()
    clients = simulated(env).clients
    assert [(client.client_id, client.num_examples) for client in clients] == [("a", 7), ("b", 4), ("c", 9)]
    for k, client in enumerate(clients):
        _, y = data.client(k)
        assert list(client.label_counts) == [int((y == c).sum()) for c in range(CLASSES)]


# --- another device ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_cuda_gives_what_the_cpu_gives(build: ModelFactory | None) -> None:
    env = tiny(shape=(5,) if build is None else (1, 4, 4), participation_probability=0.7)
    found = []
    for device in ("cpu", "cuda"):
        federation = SimulatedFederation(env, model=build, device=device, dtype=torch.float64)
        algorithm = Algorithm(nova(), adam(), "remember")
        runs = [run_rounds(federation, rule, 3, algorithm=algorithm)[0] for rule in (dr(), fedadp())]
        start = federation.initial_model(RUN)
        assert start.device.type == device
        theta = torch.ones(3, 3, dtype=torch.float64)
        kinds: tuple[AdjointKind, ...] = ("first_order", "exact")
        slopes = [
            unroll_and_grad(federation, theta, algorithm, Balanced(), kind, runs=[RUN], models=[start])[0].gradient
            for kind in kinds
        ]
        found.append([run.model.cpu() for run in runs] + [run.weights for run in runs] + slopes)
    for cpu, cuda in zip(*found, strict=True):
        assert_same(cuda, cpu, 1e-9)
