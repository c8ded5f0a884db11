"""The work that is measured: the paper's model and sizes, over images of MNIST or made-up ones."""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.config.model import ModelSpec
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.data.sources import Dataset, load_mnist
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.outer_loss import Path
from fedunfold.unfolding.update_store import UpdateStorage

FEATURES, HIDDEN, CLASSES, BATCH_SIZE, LR = 784, (128, 128), 10, 50, 0.01
ROUNDS, TEST = 10, 1000
STANDARD = [(1713, 2)] * 5
"""(samples, epochs) of five equal clients."""
COMPUTATION_SKEW = [(1713, 2), (1713, 1), (1713, 1), (1713, 1), (1716, 1)]
"""The paper's Env III."""
LABEL_SKEW = [(6775, 2), (6774, 2), (6776, 2), (6776, 2), (6776, 2)]
"""The sizes of the paper's Env II."""


MNIST, RANDOM = "MNIST", "random numbers"


@lru_cache(maxsize=1)
def _mnist() -> Dataset | None:
    """What most of the work is measured on, where it can be had."""
    try:
        return load_mnist()
    except InputError:
        return None


def images() -> str:
    """What the images are: how long our own rounds take depends on how much of them is background."""
    return RANDOM if _mnist() is None else MNIST


def _random(n: int) -> Dataset:
    draw = np.random.default_rng(0)
    x, y = draw.random((n + TEST, FEATURES), np.float32), draw.integers(0, CLASSES, n + TEST)
    return Dataset(x[:n], y[:n], x[n:], y[n:])


def federation(shares: Sequence[tuple[int, int]], rounds: int = ROUNDS, *, random: bool = False) -> Environment:
    """An environment of the paper's model over the first images of MNIST, or over random numbers."""
    data = None if random else _mnist()
    if data is None:
        data = _random(sum(samples for samples, _ in shares))
    ends = list(accumulate((samples for samples, _ in shares), initial=0))
    parts = [slice(*between) for between in pairwise(ends)]
    return Environment.from_arrays(
        {f"client-{k}": (data.x_train[part], data.y_train[part]) for k, part in enumerate(parts)},
        (data.x_test[:TEST], data.y_test[:TEST]),
        rounds=rounds,
        batch_size=BATCH_SIZE,
        lr=LR,
        epochs={f"client-{k}": epochs for k, (_, epochs) in enumerate(shares)},
        model=ModelSpec(hidden=HIDDEN),
        classes=CLASSES,
        name="benchmark",
    )


def size_theta(env: Environment) -> Tensor:
    """θ of weights by size, in every round."""
    sizes = torch.tensor(env.load().sizes, dtype=torch.float64)
    return (sizes / sizes.sum()).sqrt().expand(env.rounds, -1).clone()


def outer_step(
    federation: SimulatedFederation, theta: Tensor, adjoint: AdjointKind, storage: UpdateStorage = "full"
) -> Tensor:
    """The gradient of one outer step, as `learn` computes it."""
    models = [federation.initial_model("learn-0")]
    (found,) = unroll_and_grad(
        federation, theta, Algorithm(), Path(), adjoint, runs=["learn-0"], models=models, storage=storage
    )
    return found.gradient


def described(shares: Sequence[tuple[int, int]], rounds: int) -> str:
    """The work as JSON, for programs that know nothing of ours."""
    parts = {"features": FEATURES, "hidden": HIDDEN, "classes": CLASSES, "batch_size": BATCH_SIZE, "lr": LR}
    return json.dumps(parts | {"clients": shares, "test": TEST, "rounds": rounds})


def operations(shares: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations that the products of a round need: forward, backward to the inputs of every layer but
    the first, and the weights' gradients. Short minibatches count as they are."""
    sides = (FEATURES, *HIDDEN, CLASSES)
    layers = [below * above for below, above in pairwise(sides)]
    per_sample = 2 * (2 * sum(layers) + sum(layers[1:]))
    return float(per_sample * sum(samples * epochs for samples, epochs in shares))


def multiplication_rate(side: int = 2048, repeats: int = 3) -> float:
    """What the machine can do at best: operations a second of a large product, with torch's own threads."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    torch.mm(a, b)
    began = perf_counter()
    for _ in range(repeats):
        torch.mm(a, b)
    return 2 * side**3 * repeats / (perf_counter() - began)
