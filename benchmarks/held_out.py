"""Federations on data that no rule was learned on, each drawn by its number.

| data          | classes | features | rows                                                          |
|---------------|---------|----------|---------------------------------------------------------------|
| fashion-mnist | 10      | 784      | photographs of clothes                                        |
| dogs          | 120     | 192      | Stanford Dogs by a frozen vision transformer                  |
| boxes         | 3 to 12 | 10 to 54 | generated: a tree of thresholds over features of mixed scales |
| wine, breast-cancer | 3, 2 | 13, 30 | scikit-learn's; test sets of 60 and 170 rows                 |

Rows are divided without repetition: a row of class c goes to client k with probability ∝ size_k · q_k(c), q_k drawn
from a Dirichlet distribution, the same for all clients, or uniform over one to three classes.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedunfold.config import Environment
from fedunfold.core.rng import generator
from fedunfold.data.config import FeaturesSource
from fedunfold.data.fashion_mnist import load_fashion_mnist
from fedunfold.data.sources import Dataset

SMALL = ("wine", "breast-cancer")
"""Data with few rows to test on."""
ORDER = (
    "fashion-mnist",
    "boxes",
    "dogs",
    "fashion-mnist",
    "boxes",
    "wine",
    "fashion-mnist",
    "boxes",
    "dogs",
    "breast-cancer",
)
"""Which data federation i has, by i modulo ten."""
TEST_ROWS = 1500
OPERATIONS = 8e9
"""About 2 s of training on one core."""
LABEL_NOISE = 0.05

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Boxes:
    """A tree of thresholds whose leaves are classes, as forest cover goes by height, slope and kind of soil.

    Attributes:
        columns: Which feature each inner node compares, [2^depth − 1].
        thresholds: With what.
        leaves: The class of each leaf, [2^depth].
        kinds: Of each feature, 0 normal, 1 lognormal, 2 uniform, 3 a yes or no.
        scales: Of each feature.
    """

    columns: NDArray[np.int64]
    thresholds: NDArray[np.float64]
    leaves: Labels
    kinds: NDArray[np.int64]
    scales: NDArray[np.float64]

    @classmethod
    def draw(cls, rng: np.random.Generator, classes: int, features: int) -> "Boxes":
        """A problem with so many classes and features."""
        depth = int(np.ceil(np.log2(3 * classes)))
        kinds = rng.integers(4, size=features)
        columns = rng.integers(features, size=2**depth - 1)
        # Near the median of each kind, so that no box is nearly empty.
        near = rng.uniform(-0.5, 0.5, len(columns))
        middles = np.array([0.0, 1.0, 0.0, 0.5])[kinds[columns]]
        spreads = np.array([1.0, 0.5, 0.5, 0.0])[kinds[columns]]
        leaves = rng.permutation(np.resize(np.arange(classes), 2**depth))
        return cls(columns, middles + spreads * near, leaves, kinds, np.exp(rng.uniform(-1.2, 1.2, features)))

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Floats, Labels]:
        """Rows and their classes, a few of which are wrong."""
        normal = rng.normal(size=(count, len(self.kinds)))
        uniform = rng.uniform(-1, 1, normal.shape)
        choices = [normal, np.exp(0.5 * normal), uniform, (uniform > 0).astype(np.float64)]
        x = np.choose(self.kinds[None, :], choices)
        node = np.zeros(count, dtype=np.int64)
        while node.min() < len(self.columns):
            node = 2 * node + 1 + (x[np.arange(count), self.columns[node]] > self.thresholds[node])
        y = self.leaves[node - len(self.columns)]
        wrong = rng.random(count) < LABEL_NOISE
        y = np.where(wrong, rng.integers(self.leaves.max() + 1, size=count), y)
        return (self.scales * x).astype(np.float32), y.astype(np.int64)


def held_out(number: int) -> tuple[str, Environment]:
    """What data federation `number` has, and the federation."""
    rng = generator(0, "benchmarks", "held-out", number)
    data = ORDER[number % len(ORDER)]
    small = data in SMALL
    found = _boxes(rng) if data == "boxes" else loaded(data)
    classes = 1 + int(max(found.y_train.max(), found.y_test.max()))
    tested = rng.permutation(len(found.y_test))[:TEST_ROWS]
    sampled = not small and rng.random() < 1 / 3
    clients = _log_integer(rng, 8 if sampled else 3, 8 if small else 50)
    cohort = int(rng.integers(max(2, clients // 8), clients // 2 + 1)) if sampled else None
    rounds = int(rng.integers(8, 41))
    keys = [f"client-{k}" for k in range(clients)]
    epochs = {key: int(rng.integers(1, 6)) for key in keys}
    if rng.random() < 0.6:
        epochs = dict.fromkeys(keys, int(rng.choice([1, 1, 2, 3, 5])))
    flaky = rng.random() < 0.35
    probability = {key: float(rng.uniform(0.2, 1.0)) if flaky else 1.0 for key in keys}
    hidden = ((), (32,), (24, 24))[int(rng.integers(3))]
    widths = [found.x_train.shape[1], *hidden, classes]
    operations = 6 * sum(a * b for a, b in pairwise(widths))
    effort = rounds * float(np.mean(list(epochs.values()))) * (1 if cohort is None else cohort / clients)
    total = int(min(OPERATIONS / (operations * effort), np.exp(rng.uniform(np.log(600), np.log(4000)))))
    rows = rng.permutation(len(found.y_train))[: max(total, 12 * clients)]
    owners = divided(rng, found.y_train[rows], clients, classes)
    x, y = found.x_train[rows], found.y_train[rows]
    norm = float(np.square(x.astype(np.float64)).sum(1).mean())
    return data, Environment.from_arrays(
        {key: (x[owners == k], y[owners == k]) for k, key in enumerate(keys)},
        (found.x_test[tested], found.y_test[tested]),
        classes=classes,
        name=f"held-out-{number}",
        epochs=epochs,
        participation_probability=probability,
        model=hidden,
        rounds=rounds,
        batch_size=int(rng.choice([8, 16, 32])),
        lr=4 / norm * float(np.exp(rng.uniform(np.log(0.1), np.log(2.0)))),
        seed=int(rng.integers(2**31)),
        clients_per_round=cohort,
    )


def divided(rng: np.random.Generator, y: Labels, clients: int, classes: int) -> NDArray[np.int64]:
    """Which client gets each row; every client gets two at least."""
    kind = rng.choice(["dirichlet", "by classes", "alike"], p=[0.55, 0.3, 0.15])
    shares = np.full((clients, classes), 1 / classes)
    if kind == "dirichlet":
        shares = rng.dirichlet(np.full(classes, np.exp(rng.uniform(np.log(0.05), np.log(3.0)))), clients)
    elif kind == "by classes":
        shares = np.zeros((clients, classes))
        own = int(rng.integers(1, 4))
        for k in range(clients):
            shares[k, rng.permutation(classes)[: max(own, classes // 10)]] = 1
    sizes = rng.lognormal(0, rng.uniform(0, 1.2), clients)
    weights = sizes[:, None] * (shares + 1e-9)
    owners = np.array([rng.choice(clients, p=weights[:, c] / weights[:, c].sum()) for c in y])
    for k in range(clients):
        while (owners == k).sum() < 2:
            largest = int(np.bincount(owners, minlength=clients).argmax())
            owners[rng.choice(np.flatnonzero(owners == largest))] = k
    return owners


def _log_integer(rng: np.random.Generator, least: int, most: int) -> int:
    return min(most, int(np.exp(rng.uniform(np.log(least), np.log(most + 1)))))


def _boxes(rng: np.random.Generator) -> Dataset:
    boxes = Boxes.draw(rng, int(rng.integers(3, 13)), int(rng.integers(10, 55)))
    return Dataset(*boxes.sample(rng, 4000), *boxes.sample(rng, TEST_ROWS))


@cache
def loaded(name: str) -> Dataset:
    """Data of a file, once for every process."""
    if name == "fashion-mnist":
        return load_fashion_mnist()
    if name == "dogs":
        return FeaturesSource(path="dogs_deit_tiny.npz", test_fraction=0.2, scaling="unit").load(Path.cwd())
    from sklearn.datasets import load_breast_cancer, load_wine

    x, y = (load_wine if name == "wine" else load_breast_cancer)(return_X_y=True)
    order = generator(0, "benchmarks", name).permutation(len(y))
    x, y = ((x - x.mean(0)) / x.std(0)).astype(np.float32)[order], y.astype(np.int64)[order]
    test = {"wine": 60, "breast-cancer": 170}[name]
    return Dataset(x[test:], y[test:], x[:test], y[:test])
