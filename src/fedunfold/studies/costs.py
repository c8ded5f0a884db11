"""What a run costs in rounds, local steps and vectors sent, learning its weights included."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.unfolding import Learning

BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Costs:
    """Means over runs, hence no whole numbers.

    Attributes:
        rounds: How many.
        steps: Local steps of all clients.
        participations: How many clients took part in a round, over all rounds.
        vectors: Vectors of the model's size that were sent.
    """

    rounds: float
    steps: float
    participations: float
    vectors: float

    def megabytes(self, numbers: float) -> float:
        """What was sent, of a model of so many numbers in single precision."""
        return self.vectors * numbers * BYTES_PER_NUMBER / 1e6


def learning_costs(
    env: Environment, sizes: Sequence[int], algorithm: Algorithm, learning: Learning, run: Costs
) -> Costs:
    """What learning weights costs before the run.

    An outer iteration is a run and the final evaluation: every client receives w^(T), passes once over its data, and
    sends a gradient. Unless the outer loss is one of the final evaluation alone, an absent client does the same with
    w^(t), and with the first-order adjoint a participating one also sends its outer gradient, where that is not read
    off its model (balanced, mse, prox). The exact adjoint goes through every round once more: a participating client
    receives w^(t) and an adjoint, sends an adjoint, and makes three steps' work of one (the replay, and a
    Hessian-vector product worth two).

    Args:
        env: How clients train.
        sizes: N_k.
        algorithm: With what.
        learning: How weights are learned.
        run: What a run under them costs.
    """
    outer, exact = OUTER_LOSSES.make(learning.outer), learning.adjoint == "exact"
    runs = learning.iterations * learning.num_samples
    evaluation = sum(-(-size // env.batch_size) for size in sizes)
    cohort = env.clients_per_round or len(sizes)
    steps, vectors = 0.0, 0.0
    if not outer.only_final:
        absences = run.rounds * cohort - run.participations
        steps += runs * absences * evaluation / len(sizes)
        carried = exact or (outer.is_training_gradient and algorithm.local.fused_mu == 0)
        vectors += runs * (2 * absences + (0 if carried else run.participations))
    return Costs(
        rounds=runs * run.rounds * (2 if exact else 1),
        steps=steps + runs * (run.steps * (4 if exact else 1) + evaluation),
        participations=runs * run.participations,
        vectors=vectors + runs * (run.participations * (5 if exact else 2) + 2 * len(sizes)),
    )
