"""Both adjoints for every task in float64, against autograd through the unrolled run with losses written out here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedunfold.config import Environment
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.task import Task
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import momentum, prox, sgd
from fedunfold.tasks import binary, multilabel, next_token, regression, segmentation, survival, task
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.unrolled import Unrolled, gradients_of

SIZES = {"a": 7, "b": 4, "c": 9}
RUN = "learn-0"
FEATURES, TOKENS, LENGTH, SIDE = 5, 6, 4, 4
Losses = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Ids with a mask through scaled dot-product attention: inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(TOKENS, 6), nn.Linear(6, TOKENS)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        out: Tensor = self.out(h + self.attend(h, h, h, key_padding_mask=mask, need_weights=False)[0])
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(TOKENS, 3), nn.GRU(3, 4, batch_first=True), nn.Linear(4, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.gru(self.embed(ids))[0])
        return out


def cox(ties: str) -> Losses:
    """Row by row, as in the textbook."""

    def losses(z: Tensor, y: Tensor) -> Tensor:
        risks, times, events = z[:, 0], y[:, 0], y[:, 1]
        rows = []
        for i in range(len(y)):
            total = risks[times >= times[i]].exp().sum()
            tied = [j for j in range(len(y)) if times[j] == times[i] and events[j]]
            if ties == "efron" and events[i] and len(tied) > 1:
                total = total - tied.index(i) / len(tied) * risks[tied].exp().sum()
            rows.append((total.log() - risks[i]) * events[i])
        return torch.stack(rows)

    return losses


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    """The mean over the tokens of a row that count."""
    per_token = nn.functional.cross_entropy(z.transpose(1, 2), y, ignore_index=-100, reduction="none")
    return per_token.sum(1) / (y != -100).sum(1)


def dice_and_entropy(z: Tensor, y: Tensor) -> Tensor:
    entropy = nn.functional.cross_entropy(z, y, reduction="none").mean((1, 2))
    shares, wanted = z.softmax(1), nn.functional.one_hot(y, 3).movedim(-1, 1).double()
    both, either = (shares * wanted).sum((2, 3)), (shares + wanted).sum((2, 3))
    return entropy + 1 - ((2 * both + 1) / (either + 1)).mean(1)


def pinball(z: Tensor, y: Tensor) -> Tensor:
    return (0.9 * (y - z[:, 0])).maximum(0.1 * (z[:, 0] - y))


def targets_of(name: str, n: int, stream: np.random.Generator) -> np.ndarray:
    match name:
        case "survival":
            return np.stack([stream.integers(1, 4, n), np.arange(n) % 3 > 0], 1).astype(float)
        case "multilabel":
            return stream.integers(0, 2, (n, 3))
        case "segmentation":
            return stream.integers(0, 3, (n, SIDE, SIDE))
        case "tokens":
            tokens = stream.integers(0, TOKENS, (n, LENGTH))
            tokens[0, -1] = -100
            return tokens
        case "binary":
            return np.arange(n) % 2
        case _:
            return stream.normal(size=n)


def inputs_of(name: str, n: int, stream: np.random.Generator) -> Any:
    ids = stream.integers(0, TOKENS, (n, LENGTH))
    match name:
        case "attention":
            return {"ids": ids, "mask": np.arange(LENGTH)[None] > stream.integers(1, LENGTH, n)[:, None]}
        case "recurrent":
            return ids
        case "convolution":
            return stream.normal(size=(n, 1, SIDE, SIDE))
        case _:
            return stream.normal(size=(n, FEATURES))


def perceptron(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, outputs))


CASES: dict[str, tuple[Task, str, str, Callable[[], nn.Module], Losses]] = {
    "mse": (regression(), "numbers", "rows", perceptron(1), lambda z, y: (z - y)[:, 0] ** 2),
    "huber": (
        regression("huber", delta=0.7),
        "numbers",
        "rows",
        perceptron(1),
        lambda z, y: nn.functional.huber_loss(z, y.double(), delta=0.7, reduction="none")[:, 0],
    ),
    "multilabel": (
        multilabel(3),
        "multilabel",
        "rows",
        perceptron(3),
        lambda z, y: nn.functional.binary_cross_entropy(z.sigmoid(), y.double(), reduction="none").mean(1),
    ),
    "binary": (
        binary(),
        "binary",
        "rows",
        perceptron(2),
        lambda z, y: nn.functional.cross_entropy(z, y, reduction="none"),
    ),
    "efron": (survival(), "survival", "rows", perceptron(1), cox("efron")),
    "breslow": (survival("breslow"), "survival", "rows", perceptron(1), cox("breslow")),
    "segmentation": (
        segmentation(3),
        "segmentation",
        "convolution",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)),
        dice_and_entropy,
    ),
    "attention": (next_token(TOKENS), "tokens", "attention", Attention, token_losses),
    "recurrent": (next_token(TOKENS), "tokens", "recurrent", Recurrent, token_losses),
    "custom": (
        task("log-cosh", lambda z, y: (z[:, 0] - y).cosh().log(), {"mae": lambda z, y: (z[:, 0] - y).abs()}),
        "numbers",
        "rows",
        perceptron(1),
        lambda z, y: (z[:, 0] - y).cosh().log(),
    ),
    "no curvature": (
        task("pinball", pinball, {"pinball": pinball}, greater_is_better=False),
        "numbers",
        "rows",
        lambda: nn.Linear(FEATURES, 1),
        pinball,
    ),
}


def federation_of(chosen: Task, targets: str, inputs: str) -> Environment:
    """Three clients with unequal steps and short minibatches, absent in half of their rounds."""
    stream = np.random.default_rng(3)
    rows = {key: (inputs_of(inputs, n, stream), targets_of(targets, n, stream)) for key, n in SIZES.items()}
    test = inputs_of(inputs, 6, stream), targets_of(targets, 6, stream)
    return Environment.from_arrays(
        rows,
        test,
        rounds=3,
        batch_size=3,
        lr=0.3,
        epochs={"a": 1, "b": 2, "c": 1},
        participation_probability=0.6,
        task=chosen,
    )


def check(case: str, adjoint: AdjointKind, algorithm: Algorithm, outer: str = "path", tolerance: float = 1e-9) -> None:
    chosen, targets, inputs, build, losses = CASES[case]
    env = federation_of(chosen, targets, inputs)
    federation = SimulatedFederation(env, model=build, dtype=torch.float64)
    theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.5
    start, parts = federation.initial_model(RUN), (algorithm, OUTER_LOSSES.make(outer), adjoint)
    (found,) = unroll_and_grad(federation, theta, *parts, runs=[RUN], models=[start])
    unrolled = Unrolled(env, build(), algorithm, outer, adjoint == "first_order", losses)
    with sdpa_kernel(SDPBackend.MATH):  # the only attention that autograd differentiates twice
        loss, to_theta, _ = gradients_of(unrolled, theta, start, RUN)
    assert found.loss == pytest.approx(loss, rel=1e-10)
    assert to_theta.norm() > 1e-4
    torch.testing.assert_close(found.gradient, to_theta, rtol=0, atol=tolerance * float(to_theta.norm()))


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_for_every_task(case: str, adjoint: AdjointKind) -> None:
    check(case, adjoint, Algorithm(sgd()))


@pytest.mark.parametrize("absent", ["drop", "remember"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("case", ["efron", "huber"])
def test_gradients_with_absent_clients(case: str, adjoint: AdjointKind, absent: Absent) -> None:
    check(case, adjoint, Algorithm(sgd(), absent=absent))


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("local", [prox(0.4), momentum(0.5)], ids=["prox", "momentum"])
def test_gradients_with_other_local_optimisers(local: Any, adjoint: AdjointKind) -> None:
    check("efron", adjoint, Algorithm(local))


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("outer", ["sample", "balanced", "final"])
@pytest.mark.parametrize("case", ["efron", "mse"])
def test_gradients_with_other_outer_losses(case: str, outer: str, adjoint: AdjointKind) -> None:
    """Balancing has no meaning without classes: it is then the loss of samples."""
    check(case, adjoint, Algorithm(sgd()), outer)
