"""What a federated run leaves behind in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedunfold.core.outcomes import Evaluation, RejectedUpdate
from fedunfold.core.own_layers import OwnEntries


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        model: w^(T), [d]; empty for a reference that has no model of all clients. Layers that stay with the clients
            have the mean of theirs in it.
        weights: Θ as used, [T, K]; [T, 0] for a reference (`training.references`), which aggregates nothing.
        participated: Who participated, [T, K].
        evaluations: The test after every round.
        rejected: Clients whose updates were rejected.
        warnings: What else is odd, a line each.
        held_out: The primary metric of the final model on what each client held out, by client; empty where they held
            out nothing.
        fine_tuned: The same of the final model after each client has trained it further for itself; empty where that
            was not requested.
        client_scores: The primary metric on each client's own training data, by client, where `model` is not what
            serves the clients; else empty.
        own: The clients' own layers, where some stay with them.
        times: When each round ended, in simulated seconds; empty where the environment has no clock.
        staleness: The mean staleness of the updates of every step of an asynchronous run; else empty.

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
    fine_tuned: Mapping[str, float] = field(default_factory=dict)
    client_scores: Mapping[str, float] = field(default_factory=dict)
    own: OwnEntries | None = None
    times: tuple[float, ...] = ()
    staleness: tuple[float, ...] = ()

    def __repr__(self) -> str:
        (rounds, clients), primary = self.participated.shape, self.evaluations[-1].primary
        return f"RunResult(rounds={rounds}, clients={clients}, {primary.name}={self.scores[-1]:.3f})"

    @property
    def is_reference(self) -> bool:
        """Whether it is what federated runs are held against, and none itself."""
        return not self.weights.shape[1]

    @property
    def client_models(self) -> Tensor:
        """What serves each client, [K, d]: the model, with the client's own layers in it where it has some."""
        clients = self.participated.shape[1]
        models = self.model.expand(clients, -1)
        return models if self.own is None else self.own.put(models, range(clients))

    def time_to(self, score: float) -> float | None:
        """When the test first reached a score, in simulated seconds; None where it never did, or there is no time.

        Args:
            score: The primary metric, a fraction where it is one.
        """
        primary = self.evaluations[-1].primary
        reached = (primary.gain(own, over=score) >= 0 for own in self.scores)
        return next((time for time, enough in zip(self.times, reached, strict=False) if enough), None)

    @property
    def scores(self) -> list[float]:
        """The primary metric of the test after every round; fractions are not in percent."""
        return [evaluation.score for evaluation in self.evaluations]
