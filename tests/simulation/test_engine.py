"""What one round of the simulation reports, and which models it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedunfold.environments import Environment
from fedunfold.errors import InputError
from fedunfold.federation import RoundRequest
from fedunfold.losses import OuterLoss
from fedunfold.models import ModelFactory
from fedunfold.rounds import Algorithm, run_rounds
from fedunfold.server import adam
from fedunfold.simulation import SimulatedFederation, engine
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from fedunfold.updates import LocalUpdate, accumulated, momentum, nova, prox, sgd
from fedunfold.weighting import dr, fedadp, size
from tests.federations import CLASSES, RUN, Plain, SideBySide, Walked, convolution, mlp, simulated, tiny, train

RHO, MU = 0.6, 0.5
LOCAL: dict[str, tuple[LocalUpdate, dict[str, float]]] = {
    "sgd": (sgd(), {}),
    "prox": (prox(MU), {"mu": MU}),
    "nova": (nova(), {}),
    "momentum": (momentum(RHO), {"rho": RHO}),
}
with_every_update = pytest.mark.parametrize("name", LOCAL)


def sometimes(shape: tuple[int, ...] = (5,)) -> Environment:
    """Client b is away in round 0."""
    env = tiny(shape=shape, reliability={"a": 1.0, "b": 0.0, "c": 1.0})
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


def assert_same(found: Tensor | None, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


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
    assert_same(report.loss, vector(sum(clients[0].losses), torch.nan, sum(clients[2].losses)))
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
    assert_same(train(simulated(env), "accuracy", update=LOCAL[name][0]).accuracy, expected)


def test_only_what_was_asked_for_is_reported() -> None:
    report = train(simulated(tiny()))
    assert (report.loss, report.start_loss, report.accuracy, report.gradients) == (None, None, None, None)
    assert report.outer_loss == 0
    assert report.outer_gradient is None


def test_nobody_there() -> None:
    env = tiny(reliability=0.0)
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
    report = federation.outer(RoundRequest(RUN, 3, start, sgd(), outer=OuterLoss("final")))
    plain = Plain(env, mlp(env))
    expected = [sum(plain.losses_at(start, 3, k)) / env.epochs(k, 3) for k in range(3)]
    assert report.loss == pytest.approx(sum(expected), rel=1e-12)
    assert report.gradient.shape == start.shape


def test_the_last_layer_needs_an_outer_loss() -> None:
    federation = simulated(tiny())
    with pytest.raises(InputError, match="names no outer loss"):
        federation.outer(RoundRequest(RUN, 0, federation.initial_model(RUN), sgd()))


def test_a_round_leaves_the_model_alone() -> None:
    federation = simulated(tiny())
    start = federation.initial_model(RUN)
    before = start.clone()
    federation.train(RoundRequest(RUN, 0, start, momentum(), needs=frozenset({"gradients", "accuracy"})))
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
    monkeypatch.setattr("fedunfold.simulation.fixed_model.ROWS_AT_ONCE", {"cpu": 2})
    pieces = train(simulated(env), "loss", "start_loss", "accuracy", **request)
    for one, other in zip(vars(pieces).values(), vars(whole).values(), strict=True):
        if isinstance(other, Tensor):
            assert_same(one, other, 1e-12)
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


# --- models ------------------------------------------------------------------------------------------------


def of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Counting(nn.Module):
    """Keeps count of its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def test_constant_buffers_are_fine() -> None:
    def centred() -> nn.Module:
        layer = nn.Linear(5, 3)
        layer.register_buffer("mean", torch.ones(5))
        return layer

    assert simulated(tiny(), centred).kernel == "AnyModule"


def test_the_trained_module_predicts_as_the_federation_evaluates() -> None:
    env = tiny()
    federation = simulated(env)
    model = run_rounds(federation, size(), 2, run=RUN).model
    data = env.load()
    predicted = federation.module(model)(data.x_test).argmax(1)
    accuracy = (predicted == data.y_test).double().mean().item()
    assert federation.evaluate(model).accuracy == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: of(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), "client 'a': its last minibatch is a single"),
        (lambda: of(nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), r"layer '0' \(BatchNorm1d\) has no momentum"),
        (lambda: of(nn.Linear(5, 3), nn.AlphaDropout(0.1)), r"layer '1' \(AlphaDropout\) draws at random"),
        (lambda: of(nn.Linear(5, 3), nn.RReLU()), "other logits for the same rows each time it is trained"),
        (lambda: of(nn.Linear(5, 2)), r"gives \[20, 2\] for 20 rows, where logits of shape \[20, 3\]"),
        (lambda: of(nn.Linear(4, 3)), r"cannot read rows of shape \[5\]"),
        (Counting, "changes its buffer 'calls'"),
        (nn.Identity, "no parameters to train"),
        (lambda: nn.Linear(5, 3).requires_grad_(False), "no parameters to train"),
        (nn.Linear(5, 3), "pass a function that builds the model"),
    ],
    ids=[
        "single-row",
        "no-momentum",
        "alpha-dropout",
        "random",
        "classes",
        "width",
        "buffers",
        "no-parameters",
        "all-frozen",
        "instance",
    ],
)
def test_models_that_cannot_be_replayed_are_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        simulated(tiny(), model)
    assert "\n" not in str(caught.value)


def test_dropout_of_nothing_is_no_dropout() -> None:
    assert simulated(tiny(), lambda: of(nn.Linear(5, 3), nn.Dropout(0.0))).kernel == "AnyModule"


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (lambda: of(nn.Flatten(), nn.Linear(5, 3)), "LinearStack"),
        (lambda: of(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), "LinearStack"),
        (lambda: of(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), "AnyModule"),
        (lambda: of(nn.Linear(5, 3), nn.ReLU()), "AnyModule"),
        (lambda: of(nn.Linear(5, 4), nn.Linear(4, 3)), "AnyModule"),
        (lambda: nn.Linear(5, 3), "AnyModule"),
    ],
)
def test_which_models_take_the_batched_path(model: ModelFactory, kernel: str) -> None:
    assert simulated(tiny(), model).kernel == kernel


def half_frozen() -> nn.Module:
    """The first layer is the same in every build, as a pretrained one would be."""
    first = nn.Linear(5, 4, bias=False).requires_grad_(False)
    first.weight.copy_(torch.linspace(-1, 1, 20).reshape(4, 5))
    return of(first, nn.ReLU(), nn.Linear(4, 3))


def test_frozen_parameters_stay_and_are_not_in_the_vector() -> None:
    env = tiny()
    federation = simulated(env, half_frozen)
    start = federation.initial_model(RUN)
    assert start.shape == (4 * 3 + 3,)
    result = run_rounds(federation, size(), env.rounds, run=RUN)
    assert_same(result.model, Plain(env, half_frozen).averaged(start, env.rounds))


def test_learning_through_a_half_frozen_model() -> None:
    federation = simulated(tiny(), half_frozen)
    start = federation.initial_model(RUN)
    theta = torch.ones(2, 3, dtype=torch.float64)
    found = unfold(federation, theta, Algorithm(), OuterLoss(), "exact", run=RUN, model=start)
    assert found.model.shape == start.shape
    assert float(found.gradient.norm()) > 0


def test_single_precision_stays_single() -> None:
    report = train(simulated(tiny(), dtype=torch.float32), "gradients", "loss")
    assert report.updates.dtype == torch.float32
    assert report.sizes.dtype == torch.float64


# --- several runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
@pytest.mark.parametrize("update", [sgd(), prox(MU), nova(), accumulated(prox(MU))], ids=lambda update: update.name)
def test_the_way_back_of_several_runs_in_one_walk(update: LocalUpdate, build: ModelFactory | None) -> None:
    """What a GPU is given: the lanes of all rounds, of which some lack clients, and one has set one aside."""
    env = tiny(shape=(5,) if build is None else (1, 4, 4), reliability=0.5)
    apart, together = simulated(env, build), SideBySide(env, build)
    outer = OuterLoss("balanced")
    asked_for = [RoundRequest(run, 1, apart.initial_model(run), update, outer=outer) for run in "abcdefgh"]
    attended = {request.run: apart.train(request).present for request in asked_for}
    requests = [request for request in asked_for if attended[request.run].any()]
    presents = [attended[request.run] for request in requests]
    assert {int(present.sum()) for present in presents} == {1, 2, 3}
    next(present for present in presents if present.all())[1] = False
    torch.manual_seed(0)
    adjoints = [torch.randn(int(there.sum()), len(requests[0].model)).double() for there in presents]
    asked = (requests, presents, adjoints)
    expected = [apart.backprop(*of_run) for of_run in zip(*asked, strict=True)]
    for found in (apart.backprop_together(*asked), together.backprop_together(*asked)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, 1e-12)


def test_runs_that_are_worth_going_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a CPU; on a GPU as many as fill it with the clients of a round, here three or two, or fill its memory."""
    assert simulated(tiny()).runs_at_once == 1
    kept = 3 * 3 * len(simulated(tiny()).initial_model("a")) * 8

    def within(budget: int) -> SimulatedFederation:
        return SimulatedFederation(tiny(), dtype=torch.float64, memory_budget=budget)

    for multiprocessors, federation, expected in (
        (132, simulated(tiny()), 44),
        (132, simulated(tiny(sampled=2)), 66),
        (11, simulated(tiny()), 3),
        (2, simulated(tiny()), 1),
        (132, within(6 * kept - 1), 5),
        (132, within(1), 1),
        (132, simulated(tiny(), model=lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh())), 1),
    ):
        monkeypatch.setattr(federation, "_device", torch.device("cuda"))
        monkeypatch.setattr(engine, "multiprocessors", lambda device, count=multiprocessors: count)
        assert federation.runs_at_once == expected


# --- another device ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", [None, convolution], ids=["mlp", "convolution"])
def test_cuda_gives_what_the_cpu_gives(build: ModelFactory | None) -> None:
    env = tiny(shape=(5,) if build is None else (1, 4, 4), reliability=0.7)
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


# --- which models take the fast path -----------------------------------------------------------------------


class Scaled(nn.Sequential):
    """Linear layers with a `forward` that does more than run them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return 5 * x


def scaled() -> nn.Module:
    return Scaled(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def layer_used_twice() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(5, 3))


def tied_weights() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(5, 3))


def hooked() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.register_forward_hook(lambda _module, _inputs, out: 5 * out)
    return nn.Sequential(layer)


@pytest.mark.parametrize("build", [scaled, layer_used_twice, tied_weights, hooked])
def test_look_alikes_run_as_they_are(build: ModelFactory) -> None:
    env = tiny()
    federation = simulated(env, build)
    assert federation.kernel == "AnyModule"
    expected = Plain(env, build).averaged(federation.initial_model(RUN), 1)
    torch.testing.assert_close(run_rounds(federation, size(), 1, run=RUN).model, expected)


def test_any_module_runs_where_gradients_are_switched_off() -> None:
    env = tiny()
    with torch.no_grad():
        off = run_rounds(simulated(env, scaled), size(), 1, run=RUN).model
    torch.testing.assert_close(off, run_rounds(simulated(env, scaled), size(), 1, run=RUN).model)
