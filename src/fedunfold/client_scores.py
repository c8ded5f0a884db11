"""How well a final model serves each client: on its own training data, and on what it held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedunfold.config import Environment, environment
from fedunfold.core.params import ModelFactory
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation


@dataclass(frozen=True)
class HeldOut:
    """What the clients of a federation hold out.

    Attributes:
        federation: The same clients with these rows.
    """

    federation: SimulatedFederation

    @classmethod
    def of(cls, federation: SimulatedFederation, model: ModelFactory | None, dtype: torch.dtype) -> "HeldOut | None":
        """That of a federation; None where clients hold out nothing.

        Args:
            federation: Who trains.
            model: The function that builds its models, where it is not the environment's own.
            dtype: Their precision.
        """
        env = federation.environment
        data = env.load_held_out()
        if data is None:
            return None
        return cls(SimulatedFederation(env, data, model=model, device=federation.device, dtype=dtype))

    def scores(self, result: RunResult) -> dict[str, float]:
        """The primary metric of a run's final model at every client; fractions are not in percent."""
        found = self.federation.client_accuracies(result.model).tolist()
        return dict(zip(self.federation.data.keys, found, strict=True))


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
    federation = SimulatedFederation(environment(env), model=model, dtype=results[0].model.dtype)
    return [federation.client_accuracies(result.model).tolist() for result in results]
