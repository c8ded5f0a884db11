"""What is heterogeneous about a federation, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.config.schema import Environment
from fedunfold.core.task import Task
from fedunfold.data.federated import FederatedData
from fedunfold.tasks.survival import Survival

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Heterogeneity:
    """How unlike the clients are.

    The divergence of client k is the total variation between its label distribution p_k and the pooled one p,

        δ_k = ½ Σ_c |p_k(c) − p(c)|,   p_k(c) = n_kc/N_k,   p(c) = Σ_k n_kc/N,

    0 where it is a fair sample and nearly 1 where it holds a rare class alone. Where targets are numbers,
    it is the Kolmogorov–Smirnov distance between their distributions,

        δ_k = max_d sup_y |F_kd(y) − F_d(y)|,

    over the columns d of the targets: for survival, the times and the events, whose distance is that of their rates.

    Small clients diverge by chance. A fair sample of N_k of the N rows does so, on average and if N_k is not tiny, by

        ½ Σ_c √(2 p(c) (1 − p(c)) v_k/π),   v_k = 1/N_k − 1/N,

    the mean of |p_k(c) − p(c)| were it normal; numbers by √(π/2) ln 2 · √v_k, the mean of Kolmogorov's distribution.

    Attributes:
        divergence: δ_k by client.
        by_chance: What δ_k would be on average if the client were a fair sample.
        single_class: The class of each client that has no other, where the federation has several.
        only_class: The one class that any training sample has, where the task has several; else None.
        mean_divergence: Σ_k (N_k/N) δ_k.
        size_ratio: max N_k / min N_k.
        epochs_ratio: The same of the mean epochs in a round.
        participation_spread: max r_k − min r_k of the participation probabilities.
        expected_present: How many clients take part in a round, Σ_k r_k, times S/K where S of the K are drawn.
        nobody: The probability that no client does.
        sole_holders: The client of each class that only one client holds.
        subject: What the divergence is of: labels or targets.
        targets: What describes the targets of each client, by name: `mean` and `sd` (n − 1) of numbers, `event_rate`
            and `median_time` for survival; nothing for classes.
        between: The part of the variance of numbers that lies between clients, Σ_k N_k (ȳ_k − ȳ)² / Σ_i (y_i − ȳ)²;
            None where targets are no single number.
        between_by_chance: What it is on average where clients are fair samples, (K − 1)/(N − 1).
    """

    divergence: dict[str, float]
    mean_divergence: float
    size_ratio: float
    epochs_ratio: float
    participation_spread: float
    expected_present: float
    nobody: float
    sole_holders: dict[str, str]
    subject: Literal["labels", "targets"] = "labels"
    targets: dict[str, dict[str, float]] = field(default_factory=dict)
    between: float | None = None
    between_by_chance: float = 0.0
    by_chance: dict[str, float] = field(default_factory=dict)
    single_class: dict[str, str] = field(default_factory=dict)
    only_class: str | None = None

    @classmethod
    def of(cls, env: Environment, data: FederatedData) -> "Heterogeneity":
        """Measure a federation.

        Args:
            env: Its clients.
            data: Their data.

        Returns:
            The measures.
        """
        counts = data.label_counts.numpy().astype(np.float64)
        sizes = counts.sum(1)
        held = [data.y[start:end].numpy() for start, end in pairwise(data.offsets)]
        divergence, chance = (_variation(counts), _chance(counts)) if data.classes > 1 else _distances(held)
        epochs = [c.epochs if isinstance(c.epochs, int) else fmean(c.epochs) for c in env.clients]
        probabilities = [c.participation_probability for c in env.clients]
        clients = len(probabilities)
        drawn = clients if env.clients_per_round is None else env.clients_per_round
        several = clients > 1 and data.classes > 1
        sole = [c for c in range(data.classes) if several and (counts[:, c] > 0).sum() == 1]
        alone = (counts > 0).sum(1) == 1 if several and (counts.sum(0) > 0).sum() > 1 else np.zeros(clients, dtype=bool)
        found = np.flatnonzero(counts.sum(0))
        described = [_describe(data.task, targets) for targets in held]
        return cls(
            divergence=dict(zip(data.keys, divergence.tolist(), strict=True)),
            mean_divergence=float((sizes / sizes.sum() * divergence).sum()),
            size_ratio=float(sizes.max() / sizes.min()),
            epochs_ratio=max(epochs) / min(epochs),
            participation_spread=max(probabilities) - min(probabilities),
            expected_present=sum(probabilities) * drawn / clients,
            nobody=_nobody(probabilities, drawn),
            sole_holders={env.class_name(c): data.keys[int(counts[:, c].argmax())] for c in sole},
            subject="labels" if data.classes > 1 else "targets",
            targets=dict(zip(data.keys, described, strict=True)) if described[0] else {},
            between=_between(held) if "mean" in described[0] else None,
            by_chance=dict(zip(data.keys, chance.tolist(), strict=True)),
            single_class={data.keys[k]: env.class_name(int(counts[k].argmax())) for k in np.flatnonzero(alone)},
            only_class=env.class_name(int(found[0])) if data.classes > 1 and len(found) == 1 else None,
            between_by_chance=(clients - 1) / max(float(sizes.sum()) - 1, 1.0),
        )


def _variation(counts: Floats) -> Floats:
    """Total variation between each row of counts, as a distribution, and their sum."""
    return np.asarray(0.5 * np.abs(counts / counts.sum(1, keepdims=True) - counts.sum(0) / counts.sum()).sum(1))


def _chance(counts: Floats) -> Floats:
    """The mean variation of a fair sample of each row's size."""
    spread = np.sqrt(counts.sum(0) * (counts.sum() - counts.sum(0))).sum() / counts.sum()  # Σ_c √(p (1 − p))
    return np.asarray(0.5 * spread * np.sqrt(2 / np.pi * (1 / counts.sum(1) - 1 / counts.sum())))


def _distances(held: Sequence[NDArray[Any]]) -> tuple[Floats, Floats]:
    """δ_k of targets that are no classes, and by chance: ids by how often each occurs, numbers by their distribution
    functions."""
    if held[0].dtype.kind in "ui":
        ids = np.unique(np.concatenate([targets.ravel() for targets in held]))
        counts = np.array([(targets.ravel()[:, None] == ids).sum(0) for targets in held], dtype=np.float64)
        return _variation(counts), _chance(counts)
    columns = [targets.reshape(len(targets), -1).astype(np.float64) for targets in held]
    pooled = np.concatenate(columns)
    distances = np.array([max(map(_kolmogorov, own.T, pooled.T)) for own in columns])
    sizes = np.array([len(own) for own in columns])
    return distances, np.sqrt(np.pi / 2) * np.log(2) * np.sqrt(1 / sizes - 1 / len(pooled))


def _kolmogorov(own: Floats, pooled: Floats) -> float:
    """sup |F_own − F_pooled|."""
    at = np.unique(pooled)
    parts = (np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (own, pooled))
    return float(np.abs(np.subtract(*parts)).max())


def _describe(task: Task, targets: NDArray[Any]) -> dict[str, float]:
    """The targets of a client in two numbers, where two say something."""
    if isinstance(task, Survival):
        return {"event_rate": float(targets[:, 1].mean()), "median_time": float(np.median(targets[:, 0]))}
    if task.num_groups > 1 or targets.dtype.kind != "f" or targets[0].size != 1:
        return {}
    numbers = targets.astype(np.float64)
    return {"mean": float(numbers.mean()), "sd": float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0}


def _between(held: Sequence[NDArray[Any]]) -> float:
    """The part of the variance that lies between clients."""
    numbers = [targets.astype(np.float64) for targets in held]
    pooled = np.concatenate(numbers)
    total = float(np.square(pooled - pooled.mean()).sum())
    between = sum(len(own) * float(np.square(own.mean() - pooled.mean())) for own in numbers)
    return between / total if total > 0 else 0.0


def _nobody(probabilities: list[float], drawn: int) -> float:
    """The mean of Π(1 − r_k) over all sets of `drawn` clients.

    With E_k[j] that mean over the j-sets of the first k clients,
    E_k[j] = (1 − j/k) E_{k−1}[j] + (j/k) (1 − r_k) E_{k−1}[j−1].
    """
    means = np.zeros(drawn + 1)
    means[0] = 1.0
    for k, r in enumerate(probabilities, start=1):
        share = np.minimum(np.arange(drawn + 1) / k, 1.0)
        means[1:] = (1 - share[1:]) * means[1:] + share[1:] * (1 - r) * means[:-1]
    return float(means[drawn])
