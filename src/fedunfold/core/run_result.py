"""What a federated run leaves behind in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedunfold.core.messages import Evaluation, RejectedUpdate


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        model: w^(T), [d].
        weights: Θ as used, [T, K].
        participated: Who participated, [T, K].
        evaluations: The test after every round.
        rejected: Clients whose updates were rejected.
        warnings: What else is odd, a line each.
        held_out: The primary metric of the final model on what each client held out, by client; empty where they held
            out nothing.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew", "uniform-fedavg")
    >>> result.weights[0].tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """

    model: Tensor
    weights: Tensor
    participated: Tensor
    evaluations: tuple[Evaluation, ...]
    rejected: tuple[RejectedUpdate, ...] = ()
    warnings: tuple[str, ...] = ()
    held_out: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        (rounds, clients), primary = self.weights.shape, self.evaluations[-1].primary
        return f"RunResult(rounds={rounds}, clients={clients}, {primary.name}={self.scores[-1]:.3f})"

    @property
    def scores(self) -> list[float]:
        """The primary metric of the test after every round; fractions are not in percent."""
        return [evaluation.score for evaluation in self.evaluations]
