"""The federations that a rule is learned on: each drawn by its number, as different as federations are."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from fedunfold.config import Environment
from fedunfold.core.algorithm import Absent
from fedunfold.core.errors import InputError
from fedunfold.core.rng import generator
from fedunfold.core.settings import Count, Natural, Positive, Settings, Share
from fedunfold.data.sources import load_digits
from fedunfold.pretraining.mixtures import Mixture
from fedunfold.pretraining.pictures import Pictures
from fedunfold.pretraining.tempered_loss import TemperedLoss


class Distribution(Settings):
    """What federations are drawn from; ranges are drawn uniformly in the logarithm.

    Attributes:
        seed: Draws all of them.
        clients: How many clients there are.
        sampled_clients: How many where only some take part in a round.
        cohort: How many of these take part.
        rounds: T.
        samples: Of all clients together.
        features: Of generated data.
        classes: Of generated data.
        step: η in units of 4/mean ‖x‖², where local training of a linear model is about to become unstable.
        digits: The part of federations that hold handwritten digits.
        pictures: The part that hold generated pictures; the others hold mixtures.
        tables: The part of mixtures whose features are as unlike as those of a table.
        imbalanced: The part in which some classes are rarer than others at all clients together, as in the test data.
        sampled: The part in which only some clients take part in a round.
        flaky: The part in which clients are absent.
        uneven_epochs: The part in which clients train unequally long.
        shifted: The part in which every client has conditions of its own.
        bad: The part in which a sixth of the clients has labels in reverse or at random, or noise as inputs.
        remembered: The part in which the server remembers absent clients' updates; it drops them in the others.
    """

    seed: Natural = 0
    clients: tuple[Count, Count] = (3, 24)
    sampled_clients: tuple[Count, Count] = (20, 300)
    cohort: tuple[Count, Count] = (4, 20)
    rounds: tuple[Count, Count] = (5, 100)
    samples: tuple[Count, Count] = (600, 6000)
    features: tuple[Count, Count] = (8, 128)
    classes: tuple[Count, Count] = (2, 40)
    step: tuple[Positive, Positive] = (0.05, 2.0)
    digits: Share = 0.15
    pictures: Share = 0.3
    tables: Share = 0.5
    imbalanced: Share = 0.4
    sampled: Share = 0.3
    flaky: Share = 0.35
    uneven_epochs: Share = 0.4
    shifted: Share = 0.35
    bad: Share = 0.05
    remembered: Share = 0.85

    @model_validator(mode="after")
    def _smallest_first(self) -> Self:
        for name, value in self:
            if isinstance(value, tuple) and value[0] > value[1]:
                raise InputError(f"{name} goes from {value[0]} to {value[1]}; give the smaller number first.")
        return self

    def draw(self, number: int, purpose: str = "train") -> "DrawnFederation":
        """Federation `number`; those of another purpose are others."""
        rng = generator(self.seed, "pretraining", purpose, number)
        return _Drawing(self, rng, f"{purpose}-{number}").federation()


@dataclass(frozen=True)
class DrawnFederation:
    """A federation to learn on.

    Attributes:
        environment: It.
        absent: How the server treats absent clients.
        knows_horizon: Whether the rule is told T.
        held_out: One client with data like theirs that none of them trains on: what the rule is judged by.
    """

    environment: Environment
    absent: Absent
    knows_horizon: bool
    held_out: Environment


class _Drawing:
    def __init__(self, distribution: Distribution, rng: np.random.Generator, name: str) -> None:
        self._of, self._rng, self._name = distribution, rng, name

    def federation(self) -> DrawnFederation:
        of, rng = self._of, self._rng
        sampled, flaky = rng.random() < of.sampled, rng.random() < of.flaky
        clients = self._count(of.sampled_clients if sampled else of.clients)
        keys = [f"client-{k}" for k in range(clients)]
        x, y, test = self._data(clients)
        epochs = {key: int(rng.integers(1, 6)) for key in keys}
        if rng.random() >= of.uneven_epochs:
            epochs = dict.fromkeys(keys, int(rng.choice([1, 1, 2, 3])))
        probability = {key: float(rng.uniform(0.2, 1.0)) for key in keys} if flaky else dict.fromkeys(keys, 1.0)
        norm = float(np.mean([np.square(rows.astype(np.float64)).sum(1).mean() for rows in x]))
        hidden = [(), (16,), (32,), (32, 32)][int(rng.integers(4))]
        classes = 1 + int(max(part.max() for part in (*y, test[1])))
        if rng.random() < of.bad:
            kind = rng.choice(["reversed", "random", "noise"])
            for k in rng.permutation(clients)[: max(1, clients // 6)]:
                x[k], y[k] = self._spoiled(str(kind), x[k], y[k], classes)
        environment = Environment.from_arrays(
            dict(zip(keys, zip(x, y, strict=True), strict=True)),
            test,
            classes=classes,
            name=self._name,
            epochs=epochs,
            participation_probability=probability,
            model=hidden,
            rounds=self._count(of.rounds),
            batch_size=int(rng.choice([8, 16, 32])),
            lr=4 / norm * self._log_uniform(of.step),
            seed=int(rng.integers(2**31)),
            clients_per_round=min(clients, self._count(of.cohort)) if sampled else None,
        )
        absent: Absent = "remember" if rng.random() < of.remembered else "drop"
        held_out = Environment.from_arrays(
            {"held-out": test},
            test,
            task=TemperedLoss(classes),
            model=hidden,
            rounds=1,
            batch_size=len(test[1]),  # one minibatch, so that its loss is that of the test
            lr=environment.lr,
        )
        return DrawnFederation(environment, absent, bool(rng.random() < 0.7), held_out)

    def _data(
        self, clients: int
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int64]], tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """(x, y) of every client and of the test set."""
        of, rng = self._of, self._rng
        total = max(self._count(of.samples), 10 * clients)
        kind = rng.random()
        if kind < of.digits:
            digits = load_digits()
            labels = self._labels(clients, np.full(10, 0.1), total)
            rows = [np.flatnonzero(digits.y_train == c) for c in range(10)]
            picked = [np.array([rng.choice(rows[c]) for c in own]) for own in labels]
            return [digits.x_train[own] for own in picked], labels, (digits.x_test, digits.y_test)
        classes = self._count(of.classes)
        prior = rng.dirichlet(np.full(classes, 2.0)) if rng.random() < of.imbalanced else np.full(classes, 1 / classes)
        tested = np.repeat(np.arange(classes), np.maximum(1, np.rint(1200 * prior)).astype(int))
        if kind < of.digits + of.pictures:
            pictures, labels = Pictures.draw(rng, classes), self._labels(clients, prior, total)
            return [pictures.sample(rng, own) for own in labels], labels, (pictures.sample(rng, tested), tested)
        mixture = Mixture.draw(rng, classes, self._count(of.features), bool(rng.random() < of.tables))
        labels = self._labels(clients, prior, total)
        apart = rng.uniform(0.3, 2.0) if rng.random() < of.shifted else 0.0
        latent = mixture.mapping.shape[0]
        x = [mixture.sample(rng, own, rng.normal(0.0, apart, (latent,)) if apart else None) for own in labels]
        return x, labels, (mixture.sample(rng, tested), tested)

    def _spoiled(
        self, kind: str, x: NDArray[np.float32], y: NDArray[np.int64], classes: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(x, y) of a client from which nothing can be learned."""
        if kind == "reversed":
            return x, classes - 1 - y
        if kind == "random":
            return x, self._rng.integers(classes, size=len(y))
        return self._rng.normal(x.mean(0), x.std(0) + 1e-6, x.shape).astype(np.float32), y

    def _labels(self, clients: int, prior: NDArray[np.float64], total: int) -> list[NDArray[np.int64]]:
        """Which labels each client holds: skewed by a Dirichlet draw, by groups of classes, or not at all."""
        rng, classes = self._rng, len(prior)
        sizes = rng.dirichlet(np.full(clients, 1e6)) if rng.random() < 0.4 else rng.lognormal(0, 1, clients)
        counts = np.maximum(6, np.rint(total * sizes / sizes.sum())).astype(int)
        kind = rng.choice(["dirichlet", "groups", "alike"], p=[0.4, 0.45, 0.15])
        shares = np.ones((clients, classes))
        if kind == "dirichlet":
            shares = rng.dirichlet(np.full(classes, self._log_uniform((0.05, 3.0))), clients)
        elif kind == "groups":  # most clients share the common classes, a few hold the others alone
            rare = rng.permutation(classes)[: max(1, int(classes * rng.uniform(0.2, 0.6)))]
            common = np.setdiff1d(np.arange(classes), rare) if len(rare) < classes else rare
            holders = rng.permutation(clients)[: max(1, min(len(rare), int(clients * rng.uniform(0.15, 0.5))))]
            shares = np.zeros((clients, classes))
            shares[:, common] = 1
            shares[holders] = 0
            for place, c in enumerate(rare):
                shares[holders[place % len(holders)], c] = 1
        shares = (shares + 1e-12) * prior
        shares = shares / shares.sum(1, keepdims=True)
        return [rng.choice(classes, size=n, p=p).astype(np.int64) for n, p in zip(counts, shares, strict=True)]

    def _log_uniform(self, bounds: tuple[float, float]) -> float:
        return float(np.exp(self._rng.uniform(*np.log(bounds))))

    def _count(self, bounds: tuple[int, int]) -> int:
        return min(bounds[1], int(self._log_uniform((bounds[0], bounds[1] + 1))))
