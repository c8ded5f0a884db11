"""FedLAW by hand, on losses with a known optimum, and against a transcription in NumPy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedunfold as fu
from fedunfold.config import Environment
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, OpenUpdates
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import RoundRng
from fedunfold.core.parts import RoundDecision
from fedunfold.rules import fedlaw, size
from fedunfold.rules.rule import Rule, decide, uses_of
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method
from tests.support.federations import participation, simulated
from tests.support.reports import report

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OneLoss:
    """A server whose rows all have the same loss, given by its gradient; every epoch is one minibatch."""

    gradient: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return 4

    def minibatches(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        return [np.arange(4)]

    def loss_and_gradient(self, model: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), self.gradient(model)


def asked(rule: Rule, server: OneLoss, model: Sequence[float], sizes: Sequence[int], **more: Any) -> RoundDecision:
    given = report(sizes, **more)
    given = replace(given, model=torch.tensor(model, dtype=torch.float64), server_data=server)
    decision, state = decide(rule, given, None)
    assert state is None
    return decision


def towards(*optimum: float) -> OneLoss:
    """½‖w − c‖²."""
    return OneLoss(lambda w: w - torch.tensor(optimum, dtype=w.dtype))


def vectors(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_two_steps_by_hand() -> None:
    """A linear model of one feature 1 with the target 2, ℓ = ½ (w − 2)²; w = 1, w_1 = 2, w_2 = 0, sizes 3 : 1.

    Step 1: Θ = (.75, .25) and e^γ = 1 give the model 1.5, g = −.5; a = g (Δ_1, Δ_2) = (−.5, .5), Σ Θ a = −.25;
    ∂λ = (.75 (−.25), .25 (.75)) = (−.1875, .1875), ∂γ = −.5 · 1.5 = −.75. Adam's first step has the length lr:
    λ = (log 3 + .1, −.1), γ = .1.
    Step 2: Θ_1 = 3 e^.1 / (3 e^.1 + e^−.1) = .7856013, the mean 2 Θ_1 = 1.5712027, the model 1.7364475, g = −.2635525;
    a = e^.1 g (1, −1) = (−.2912705, .2912705), ∂λ_1 = 2 Θ_1 Θ_2 a_1 = −.0981185 = −∂λ_2, ∂γ = −.4576451.
    With m = (.25 g_1 + .5 g_2) / .75 and v = (.000999 g_1² + .001 g_2²) / .001999 the steps are
    λ: .1 · .1279123 / .1496174 = .0854930, γ: .1 · .5550967 / .6211934 = .0893597.
    """
    server, sent = OneLoss(lambda w: w - 2), vectors([1.0], [-1.0])
    first = asked(fedlaw(epochs=1, lr=0.1), server, [1.0], [3, 1], updates=sent)
    assert first.weights.tolist() == pytest.approx([0.7856013, 0.2143987], abs=1e-7)
    assert math.log(first.scale) == pytest.approx(0.1, rel=1e-6)
    second = asked(fedlaw(epochs=2, lr=0.1), server, [1.0], [3, 1], updates=sent)
    log_odds = float((second.weights[0] / second.weights[1]).log())
    assert log_odds == pytest.approx(math.log(3) + 2 * (0.1 + 0.0854930), abs=1e-6)
    assert math.log(second.scale) == pytest.approx(0.1893597, abs=1e-6)
    assert (second.step, second.momentum, second.trust) == (1, 0, 1)


def test_a_known_optimum_is_found() -> None:
    """e^γ (Θ_1 (2, 0) + Θ_2 (0, 2)) = (.9, .3) at Θ = (.75, .25) and e^γ = .6, wherever w is."""
    for model in ([0.0, 0.0], [1.0, -1.0]):
        sent = vectors([2.0, 0.0], [0.0, 2.0]) - torch.tensor(model, dtype=torch.float64)
        found = asked(fedlaw(epochs=2000, lr=0.01), towards(0.9, 0.3), model, [1, 5], updates=sent)
        assert found.weights.tolist() == pytest.approx([0.75, 0.25], abs=1e-4)
        assert found.scale == pytest.approx(0.6, abs=1e-4)


def test_it_begins_from_the_sizes_of_those_who_enter() -> None:
    """Where nothing pulls, Θ stays N_k/N over them."""
    still = OneLoss(torch.zeros_like)
    everybody = asked(fedlaw(), still, [0.0, 0.0], [30, 10, 20])
    assert everybody.weights.tolist() == pytest.approx([0.5, 1 / 6, 1 / 3])
    assert everybody.scale == 1
    some = asked(fedlaw(), still, [0.0, 0.0], [30, 10, 20], participated=[True, False, True])
    assert some.weights.tolist() == pytest.approx([0.6, 0, 0.4])
    nobody = asked(fedlaw(), still, [0.0, 0.0], [30, 10, 20], participated=[False] * 3)
    assert nobody.weights.tolist() == pytest.approx([0.5, 1 / 6, 1 / 3])
    assert nobody.scale == 1


def test_remembered_updates_count() -> None:
    given = report([1, 1, 1], participated=[True, False, False], updates=vectors([1.0, 0.0]))
    remembered = OpenUpdates(torch.tensor([0, 2]), vectors([1.0, 0.0], [0.0, 1.0]))
    given = replace(given, remembered=remembered, model=vectors([0, 0])[0], server_data=towards(0.2, 0.8))
    decision, _ = decide(fedlaw(epochs=2000), given, None)
    assert decision.weights.tolist() == pytest.approx([0.2, 0, 0.8], abs=1e-4)


def test_running_statistics_are_averaged_and_not_scaled() -> None:
    """One parameter and one buffer: the loss is asked at (e^γ w̄, b̄), and nothing of it depends on the buffer's pull."""
    layout = ParamLayout(("w",), (torch.Size([1]),), ("b",), (torch.Size([1]),))
    met: list[Tensor] = []

    def gradient(w: Tensor) -> Tensor:
        met.append(w.clone())
        return torch.stack([w[0] - 4, torch.zeros_like(w[1])])

    given = report([1, 1], updates=vectors([1.0, 3.0], [1.0, 5.0]))
    given = replace(given, model=vectors([1, 10])[0], server_data=OneLoss(gradient), layout=layout)
    decision, _ = decide(fedlaw(epochs=3, lr=0.1), given, None)
    assert decision.weights.tolist() == [0.5, 0.5]
    assert [w[1].item() for w in met] == [14.0] * 3
    assert met[0][0].item() == 2.0
    assert met[2][0].item() > met[1][0].item() > 2.0


def test_a_server_without_data_is_an_error() -> None:
    with pytest.raises(
        InputError, match=r"rule 'fedlaw' reads data of the server, .* give the environment server_rows"
    ):
        decide(fedlaw(), report([1, 1]), None)
    for call in (fu.run, lambda env, name: fu.compare(env, ["fedavg", name])):
        with pytest.raises(InputError, match="rule 'fedlaw' reads data of the server"):
            call("digits-label-skew", "fedlaw")
    with pytest.raises(InputError, match="reported without its model"):
        decide(fedlaw(), replace(report([1, 1]), server_data=towards(0, 0)), None)


def test_names_settings_and_what_it_uses() -> None:
    assert [fedlaw().name, fedlaw(5, lr=0.1).name] == ["fedlaw", "fedlaw(epochs=5, lr=0.1)"]
    assert uses_of(fedlaw()) == {"server data"}
    assert uses_of(size()) == frozenset()
    chosen = method("fedlaw")
    assert chosen.rule is not None
    assert (chosen.rule.name, chosen.algorithm) == ("fedlaw", Algorithm())


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"epochs": 1.5}, {"lr": 0.0}, {"lr": math.inf}, {"batch_size": 0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="fedlaw needs"):
        fedlaw(**bad)


# --- against NumPy -----------------------------------------------------------------------------------------


def softmax_regression(theta: Floats, x: Floats, y: NDArray[np.int64], classes: int) -> Floats:
    """The gradient of the mean cross-entropy in θ = (W row by row, b)."""
    weight, bias = theta[: classes * x.shape[1]].reshape(classes, -1), theta[classes * x.shape[1] :]
    logits = x @ weight.T + bias
    odds = np.exp(logits - logits.max(1, keepdims=True))
    error = odds / odds.sum(1, keepdims=True) - np.eye(classes)[y]
    return np.concatenate([(error.T @ x / len(x)).ravel(), error.mean(0)])


def fedlaw_in_numpy(
    rows: Mapping[str, tuple[Floats, NDArray[np.int64]]],
    server: tuple[Floats, NDArray[np.int64]],
    start: Floats,
    local: Callable[[str, int, int], Sequence[NDArray[Any]]],
    proxy: Callable[[int, int], Sequence[NDArray[Any]]],
    present: Callable[[int], Sequence[bool]],
    *,
    rounds: int,
    lr: float,
    epochs: int,
    server_lr: float,
) -> tuple[Floats, list[Floats]]:
    """Rounds of FedLAW over softmax regression, absent clients being left out: the model and Θ of every round."""
    w, table = start, []
    for t in range(rounds):
        trained, sizes, here = [], [], present(t)
        for (key, (x, y)), participates in zip(rows.items(), here, strict=True):
            if not participates:
                continue
            own = w.copy()
            for batch in local(key, t, len(y)):
                own -= lr * softmax_regression(own, x[batch], y[batch], 3)
            trained.append(own)
            sizes.append(len(y))
        weights = np.zeros(len(rows))
        if trained:
            models, z = np.stack(trained), np.append(np.log(sizes), 0.0)
            m, v, step = np.zeros_like(z), np.zeros_like(z), 0
            for epoch in range(epochs):
                for batch in proxy(t, epoch):
                    p = np.exp(z[:-1] - z[:-1].max())
                    p /= p.sum()
                    model = math.exp(z[-1]) * (p @ models)
                    g = softmax_regression(model, server[0][batch], server[1][batch], 3)
                    along = math.exp(z[-1]) * (models @ g)
                    slope = np.append(p * (along - p @ along), g @ model)
                    step += 1
                    m, v = 0.5 * m + 0.5 * slope, 0.999 * v + 0.001 * slope**2
                    z = z - server_lr * (m / (1 - 0.5**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
            p = np.exp(z[:-1] - z[:-1].max())
            p /= p.sum()
            w = math.exp(z[-1]) * (p @ models)
            weights[np.array(here)] = p
        else:
            counts = np.array([len(y) for _, y in rows.values()])
            weights = counts / counts.sum()
        table.append(weights)
    return w, table


CENTRES = np.array([[2.0, 0.0, 0.3], [-1.0, 1.7, 0.0], [-1.0, -1.7, 0.5]])


def blobs(n: int, seed: int, flipped: bool = False) -> tuple[Any, NDArray[np.int64]]:
    stream = np.random.default_rng(seed)
    y = stream.integers(0, 3, n)
    x = (CENTRES[y] + 0.7 * stream.normal(size=(n, 3))).astype(np.float32)  # which is what an environment keeps
    return x, (y + 1) % 3 if flipped else y


def federation(**settings: Any) -> Environment:
    clients = {"a": blobs(14, 1), "b": blobs(7, 2, flipped=True), "c": blobs(23, 3)}
    defaults: dict[str, Any] = {"rounds": 4, "batch_size": 5, "lr": 0.3, "epochs": 2, "model": ()}
    return Environment.from_arrays(clients, blobs(30, 4), server_data=blobs(17, 5), **defaults | settings)


@pytest.mark.parametrize("absent", ["keep", "drop"])
@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_it_is_the_transcription_in_numpy(absent: Absent, probability: float) -> None:
    env = federation(participation_probability=probability, seed=3)
    engine, data = simulated(env), env.load()
    rule = fedlaw(epochs=6, lr=0.05, batch_size=6)

    def local(key: str, t: int, n: int) -> list[NDArray[np.int64]]:
        orders = [RoundRng(env.seed, "trial-0", t).permutation(key, epoch, n) for epoch in range(2)]
        return [order[begin : begin + 5] for order in orders for begin in range(0, n, 5)]

    def proxy(t: int, epoch: int) -> Sequence[NDArray[Any]]:
        rows = engine.server_data(Algorithm().request("trial-0", t, engine.initial_model("trial-0")))
        assert rows is not None
        return rows.minibatches(epoch, 6)

    assert data.server is not None
    held = data.server[0], data.server[1]
    assert isinstance(held[0], Tensor)
    rows = {
        key: (x.double().numpy(), y.numpy()) for key, (x, y) in zip(data.keys, map(data.client, range(3)), strict=True)
    }
    model, table = fedlaw_in_numpy(
        rows,
        (held[0].double().numpy(), held[1].numpy()),
        engine.initial_model("trial-0").numpy(),
        local,
        proxy,
        lambda t: participation(env, "trial-0", t).participating.tolist(),
        rounds=4,
        lr=0.3,
        epochs=6,
        server_lr=0.05,
    )
    (result,) = run_rounds(engine, rule, 4, algorithm=Algorithm(absent=absent))
    assert result.participated.all() == (probability == 1)
    assert np.abs(result.weights.numpy() - np.stack(table)).max() <= 1e-6
    assert np.abs(result.model.numpy() - model).max() <= 1e-6
    assert np.abs(result.weights.numpy() - result.weights[:1].numpy()).max() > 0.01


def test_a_client_with_wrong_labels_loses_weight() -> None:
    """Also the model is better than by size, which the wrong labels spoil."""
    clients = {"right": blobs(40, 1), "wrong": blobs(60, 2, flipped=True)}
    settings: dict[str, Any] = {"rounds": 6, "batch_size": 10, "lr": 0.3, "epochs": 2, "server_data": blobs(30, 3)}
    env = Environment.from_arrays(clients, blobs(200, 4), **settings)
    ours, theirs = (fu.run(env, chosen) for chosen in (fedlaw(lr=0.1), size()))
    assert (ours.weights[:, 1] < 0.25).all()
    assert ours.scores[-1] > theirs.scores[-1] + 0.1


def test_what_it_reads_decides() -> None:
    """Another server would weigh otherwise: the rows are read, and no others."""
    clients = {"right": blobs(40, 1), "wrong": blobs(40, 2, flipped=True)}
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 10, "lr": 0.3}
    found = [
        fu.run(Environment.from_arrays(clients, blobs(9, 4), server_data=own, **settings), fedlaw(lr=0.1)).weights[0]
        for own in (blobs(30, 3), blobs(30, 3, flipped=True))
    ]
    assert found[0][0] > 0.7
    assert found[1][0] < 0.3


def test_the_order_of_its_minibatches_is_drawn_by_run_and_round() -> None:
    engine = simulated(federation())
    start = engine.initial_model("trial-0")

    def order(run: str, t: int, epoch: int) -> list[int]:
        found = engine.server_data(Algorithm().request(run, t, start))
        assert found is not None and len(found) == 17
        batches = found.minibatches(epoch, 5)
        assert [len(batch) for batch in batches] == [5, 5, 5, 2]
        return [int(row) for batch in batches for row in batch]

    first = order("trial-0", 0, 0)
    assert sorted(first) == list(range(17))
    assert order("trial-0", 0, 0) == first
    assert first not in (order("trial-1", 0, 0), order("trial-0", 1, 0), order("trial-0", 0, 1))


def test_the_report_names_the_rounds_model() -> None:
    engine, met = simulated(federation()), list[ClientUpdates]()

    @fu.rule()
    def noting(updates: ClientUpdates, state: Any) -> tuple[Tensor, Any]:
        met.append(updates)
        return updates.num_examples / updates.num_examples.sum(), state

    (result,) = run_rounds(engine, noting, 2)
    assert met[0].model is not None and met[1].model is not None
    torch.testing.assert_close(met[0].model, engine.initial_model("trial-0"))
    after = met[1].model + met[1].num_examples / met[1].num_examples.sum() @ met[1].updates.rows
    torch.testing.assert_close(after, result.model)
