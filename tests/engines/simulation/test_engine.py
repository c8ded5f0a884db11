"""What one round of the simulation reports."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.federation import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local.optimizers import LocalOptimizer, accumulated, momentum, nova, prox, sgd
from fedunfold.rules import dr, fedadp
from fedunfold.server.optimizers import adam
from fedunfold.training.loop import Algorithm, run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from tests.support.federations import CLASSES, RUN, Plain, Walked, assert_same, convolution, mlp, simulated, tiny, train

RHO, MU = 0.6, 0.5
LOCAL: dict[str, tuple[LocalOptimizer, dict[str, float]]] = {
    "sgd": (sgd(), {}),
    "prox": (prox(MU), {"mu": MU}),
    "nova": (nova(), {}),
    "momentum": (momentum(RHO), {"rho": RHO}),
}
with_every_update = pytest.mark.parametrize("name", LOCAL)


def sometimes(shape: tuple[int, ...] = (5,)) -> Environment:
    """Client b is away in round 0."""
    env = tiny(shape=shape, participation_probability={"a": 1.0, "b": 0.0, "c": 1.0})
    assert Plain(env, mlp(env)).present(0) == [True, False, True]
    return env


def walked(env: Environment, name: str, build: ModelFactory | None = None) -> tuple[Tensor, dict[int, Walked]]:
    """w^(0), and the present clients' local training from it in plain PyTorch."""
    plain = Plain(env, build or mlp(env))
    start = simulated(env, build).initial_model(RUN)
    steps = plain.steps(0)
    effective = sum(share * n for share, n in zip(plain.shares, steps, strict=True))
    there = [k for k, here in enumerate(plain.present(0)) if here]
    scales = {k: effective / steps[k] if name == "nova" else 1.0 for k in there}
    return start, {k: plain.walk(start, 0, k, scale=scales[k], **LOCAL[name][1]) for k in there}


def stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- reports -----------------------------------------------------------------------------------------------


@with_every_update
@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_updates_losses_and_gradients(name: str, build: ModelFactory | None) -> None:
    env = sometimes((5,) if build is None else (1, 4, 4))
    start, clients = walked(env, name, build)
    report = train(simulated(env, build), "loss", "gradients", update=LOCAL[name][0])
    assert report.round == 0
    assert report.keys == ("a", "b", "c")
    assert report.sizes.tolist() == [7, 4, 9]
    assert report.present.tolist() == [True, False, True]
    assert report.steps.tolist() == [3, 0, 6]
    assert_same(report.updates, stacked([client.model - start for client in clients.values()]))
    assert_same(report.gradients, stacked([client.gradient for client in clients.values()]))
    away = sum(Plain(env, build or mlp(env)).losses_at(start, 0, 1))
    assert_same(report.loss, vector(sum(clients[0].losses), away, sum(clients[2].losses)))


@pytest.mark.parametrize("base", ["sgd", "prox", "momentum"])
def test_accumulated_updates_are_rescaled_and_gradients_are_not(base: str) -> None:
    env = sometimes()
    start, clients = walked(env, base)
    report = train(simulated(env), "gradients", update=accumulated(LOCAL[base][0]))
    factors: dict[str, list[float]] = {
        "sgd": [1.0] * 6,
        "prox": [0.85**i for i in range(6)],  # 1 − ημ = 1 − 0.3·0.5
        "momentum": [(1 - 0.6**i) / 0.4 for i in range(1, 7)],
    }
    norms = {steps: sum(factors[base][:steps]) for steps in (3, 6)}
    effective = 0.35 * norms[3] + 0.45 * norms[6]
    scales = {0: effective / norms[3], 2: effective / norms[6]}
    assert_same(report.updates, stacked([scales[k] * (c.model - start) for k, c in clients.items()]))
    assert_same(report.gradients, stacked([client.gradient for client in clients.values()]))


def test_the_loss_of_those_away_may_be_skipped() -> None:
    env = sometimes()
    _, clients = walked(env, "sgd")
    report = train(simulated(env), "loss", "start_loss", absent_loss="skip")
    assert_same(report.loss, vector(sum(clients[0].losses), torch.nan, sum(clients[2].losses)), unknown=True)
    assert report.start_loss is not None
    assert report.start_loss.isnan().tolist() == [False, True, False]


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
    assert_same(train(federation, "start_loss").start_loss, vector(*expected))


@with_every_update
def test_accuracy_is_that_of_the_trained_model_on_its_own_data(name: str) -> None:
    env = sometimes()
    plain = Plain(env, mlp(env))
    _, clients = walked(env, name)
    expected = vector(torch.nan, torch.nan, torch.nan)
    for k, client in clients.items():
        x, y = plain.client(k)
        expected[k] = (plain.module(client.model)(x).argmax(1) == y).double().mean()
    assert_same(train(simulated(env), "accuracy", update=LOCAL[name][0]).accuracy, expected, unknown=True)


def test_only_what_was_asked_for_is_reported() -> None:
    report = train(simulated(tiny()))
    assert (report.loss, report.start_loss, report.accuracy, report.gradients) == (None, None, None, None)
    assert report.outer_loss == 0
    assert report.outer_gradient is None


def test_nobody_there() -> None:
    env = tiny(participation_probability=0.0)
    federation = simulated(env)
    start = federation.initial_model(RUN)
    report = train(federation, "loss", "accuracy", "gradients", outer=OuterLoss())
    assert report.updates.shape == (0, len(start))
    assert report.gradients is not None
    assert report.gradients.shape == (0, len(start))
    assert report.accuracy is not None
    assert report.accuracy.isnan().all()
    assert report.steps.tolist() == [0, 0, 0]
    at_start = [sum(Plain(env, mlp(env)).losses_at(start, 0, k)) for k in range(3)]
    assert_same(report.loss, vector(*at_start))
    assert report.outer_loss == pytest.approx(sum(at_start), rel=1e-12)
    silent = train(federation, "loss", outer=OuterLoss(), absent_loss="skip")
    assert silent.loss is not None
    assert silent.loss.isnan().all()
    assert silent.outer_loss == 0


@pytest.mark.parametrize("absent_loss", ["evaluate", "skip"])
def test_outer_loss_along_the_way(absent_loss: str) -> None:
    env = sometimes()
    start, clients = walked(env, "sgd")
    away = sum(Plain(env, mlp(env)).losses_at(start, 0, 1)) if absent_loss == "evaluate" else 0.0
    met = {k: sum(client.losses) for k, client in clients.items()}
    path = train(simulated(env), outer=OuterLoss("path"), absent_loss=absent_loss)
    assert path.outer_loss == pytest.approx(met[0] + away + met[2], rel=1e-12)
    sample = train(simulated(env), outer=OuterLoss("sample"), absent_loss=absent_loss)
    assert sample.outer_loss == pytest.approx(met[0] + away / 2 + met[2] / 2, rel=1e-12)
    assert train(simulated(env), outer=OuterLoss("final"), absent_loss=absent_loss).outer_loss == 0


def test_the_last_layer_meets_all_clients_at_one_model() -> None:
    env = sometimes()
    federation = simulated(env)
    start = federation.initial_model(RUN)
    report = federation.outer(TrainRequest(RUN, 3, start, sgd(), outer=OuterLoss("final")))
    plain = Plain(env, mlp(env))
    expected = [sum(plain.losses_at(start, 3, k)) / env.epochs(k, 3) for k in range(3)]
    assert report.loss == pytest.approx(sum(expected), rel=1e-12)
    assert report.gradient.shape == start.shape


def test_the_last_layer_needs_an_outer_loss() -> None:
    federation = simulated(tiny())
    with pytest.raises(InputError, match="names no outer loss"):
        federation.outer(TrainRequest(RUN, 0, federation.initial_model(RUN), sgd()))


def test_a_round_leaves_the_model_alone() -> None:
    federation = simulated(tiny())
    start = federation.initial_model(RUN)
    before = start.clone()
    federation.train(TrainRequest(RUN, 0, start, momentum(), needs=frozenset({"gradients", "accuracy"})))
    assert torch.equal(start, before)
    assert not start.requires_grad


def test_a_client_trains_the_same_alone() -> None:
    among = train(simulated(tiny()), "loss", "gradients")
    for k, key in enumerate(among.keys):
        alone = train(simulated(tiny({key: int(among.sizes[k])})), "loss", "gradients")
        assert_same(alone.updates[0], among.updates[k])
        assert among.loss is not None
        assert_same(alone.loss, among.loss[k : k + 1])


def test_more_rows_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = sometimes()
    request: dict[str, Any] = {"outer": OuterLoss("balanced"), "path_gradient": True}
    whole = train(simulated(env), "loss", "start_loss", "accuracy", **request)
    monkeypatch.setattr("fedunfold.engines.simulation.fixed_model.ROWS_AT_ONCE", {"cpu": 2})
    pieces = train(simulated(env), "loss", "start_loss", "accuracy", **request)
    for one, other in zip(vars(pieces).values(), vars(whole).values(), strict=True):
        if isinstance(other, Tensor):
            assert_same(one, other, 1e-12, unknown=True)
    assert pieces.outer_loss == pytest.approx(whole.outer_loss, rel=1e-12)
    model = simulated(env).initial_model(RUN)
    few = simulated(env).evaluate(model)
    monkeypatch.undo()
    many = simulated(env).evaluate(model)
    assert (few.accuracy, few.loss) == pytest.approx((many.accuracy, many.loss), rel=1e-12)


def test_clients_are_described() -> None:
    env = tiny()
    data = env.load()
    clients = simulated(env).clients
    assert [(client.key, client.samples) for client in clients] == [("a", 7), ("b", 4), ("c", 9)]
    for k, client in enumerate(clients):
        _, y = data.client(k)
        assert list(client.label_counts) == [int((y == c).sum()) for c in range(CLASSES)]


# --- another device ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_cuda_gives_what_the_cpu_gives(build: ModelFactory | None) -> None:
    env = tiny(shape=(5,) if build is None else (1, 4, 4), participation_probability=0.7)
    found = []
    for device in ("cpu", "cuda"):
        federation = SimulatedFederation(env, model=build, device=device, dtype=torch.float64)
        algorithm = Algorithm(nova(), adam(), "remember")
        runs = [run_rounds(federation, rule, 3, algorithm=algorithm, run=RUN) for rule in (dr(), fedadp())]
        start = federation.initial_model(RUN)
        assert start.device.type == device
        theta = torch.ones(3, 3, dtype=torch.float64)
        kinds: tuple[AdjointKind, ...] = ("first_order", "exact")
        slopes = [
            unfold(federation, theta, algorithm, OuterLoss("balanced"), kind, run=RUN, model=start).gradient
            for kind in kinds
        ]
        found.append([run.model.cpu() for run in runs] + [run.weights for run in runs] + slopes)
    for cpu, cuda in zip(*found, strict=True):
        assert_same(cuda, cpu, 1e-9)
