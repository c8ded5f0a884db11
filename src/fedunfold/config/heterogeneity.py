"""What is heterogeneous about a federation, in numbers."""

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedunfold.config.schema import Environment
from fedunfold.data.federated import FederatedData


@dataclass(frozen=True)
class Heterogeneity:
    """How unlike the clients are.

    The divergence of client k is the total variation between its label distribution p_k and the pooled one p,

        δ_k = ½ Σ_c |p_k(c) − p(c)|,   p_k(c) = n_kc/N_k,   p(c) = Σ_k n_kc/N,

    0 where it is a fair sample and nearly 1 where it holds a rare class alone.

    Attributes:
        divergence: δ_k by client.
        mean_divergence: Σ_k (N_k/N) δ_k.
        size_ratio: max N_k / min N_k.
        epochs_ratio: The same of the mean epochs in a round.
        participation_spread: max r_k − min r_k of the participation probabilities.
        expected_present: How many clients take part in a round, Σ_k r_k, times S/K where S of the K are drawn.
        nobody: The probability that no client does.
        sole_holders: The client of each class that only one client holds.
    """

    divergence: dict[str, float]
    mean_divergence: float
    size_ratio: float
    epochs_ratio: float
    participation_spread: float
    expected_present: float
    nobody: float
    sole_holders: dict[str, str]

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
        pooled = counts.sum(0) / counts.sum()
        divergence = 0.5 * np.abs(counts / sizes[:, None] - pooled).sum(1)
        epochs = [c.epochs if isinstance(c.epochs, int) else fmean(c.epochs) for c in env.clients]
        probabilities = [c.participation_probability for c in env.clients]
        clients = len(probabilities)
        drawn = clients if env.clients_per_round is None else env.clients_per_round
        sole = [c for c in range(data.classes) if (counts[:, c] > 0).sum() == 1 and clients > 1]
        return cls(
            divergence=dict(zip(data.keys, divergence.tolist(), strict=True)),
            mean_divergence=float((sizes / sizes.sum() * divergence).sum()),
            size_ratio=float(sizes.max() / sizes.min()),
            epochs_ratio=max(epochs) / min(epochs),
            participation_spread=max(probabilities) - min(probabilities),
            expected_present=sum(probabilities) * drawn / clients,
            nobody=_nobody(probabilities, drawn),
            sole_holders={env.class_name(c): data.keys[int(counts[:, c].argmax())] for c in sole},
        )


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
