"""How well a final model serves each client: on its own training data, and on what it held out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.params import ModelFactory
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.training.personal import FineTuning, Personal


@dataclass(frozen=True)
class HeldOut:
    """What the clients of a federation hold out.

    Attributes:
        federation: The same clients with these rows; None where they hold out nothing.
        fine_tuning: How final models are trained further before they are tested once more, where they are.
    """

    federation: SimulatedFederation | None
    fine_tuning: FineTuning | None = None

    @classmethod
    def of(cls, federation: SimulatedFederation, personal: Personal | None = None) -> "HeldOut":
        """That of a federation.

        Args:
            federation: Who trains.
            personal: Epochs of fine-tuning, where it is wanted.
        """
        env = federation.environment
        data = env.load_held_out()
        held = None if data is None else federation.over(env, data)
        return cls(held, None if personal is None else FineTuning.of(federation, held, personal))

    def tested(self, result: RunResult, run: str, algorithm: Algorithm) -> RunResult:
        """A run with the primary metric of its final model at every client; fractions are not in percent.

        Args:
            result: The run.
            run: Names its randomness.
            algorithm: How it was trained.
        """
        if self.federation is None:
            return result
        found = self.federation.client_accuracies(result.client_models).tolist()
        result = replace(result, held_out=dict(zip(self.federation.data.keys, found, strict=True)))
        if self.fine_tuning is None:
            return result
        return replace(result, fine_tuned=self.fine_tuning.scores(result, run, algorithm))


def client_scores(
    env: Environment | str | Path, results: Sequence[RunResult], *, model: ModelFactory | None = None
) -> list[list[float]]:
    """The primary metric of every run's final model on each client's own training data.

    Args:
        env: The environment of the runs.
        results: The runs.
        model: The function that built their classifier, where it was not the environment's own.

    Returns:
        Of every run a number for each client; fractions are not in percent.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew")
    >>> len(client_scores("digits-label-skew", [result])[0])
    5
    """
    if not results:
        return []
    if all(result.client_scores for result in results):
        return [list(result.client_scores.values()) for result in results]
    federation = SimulatedFederation(environment(env), model=model, dtype=results[0].model.dtype)
    return [federation.client_accuracies(result.client_models).tolist() for result in results]
