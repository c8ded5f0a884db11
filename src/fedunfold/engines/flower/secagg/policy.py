"""What a site accepts of a server, whatever it is sent: the site's own settings, in its node-config."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Natural, Positive, Settings
from fedunfold.engines.flower.schema import TrainInstruction

ADJOINTS = frozenset({"vjp:adjoint", "train:outer_gradient"})
"""The only two things that enter one sum beside each other: the backward pass, and absent clients' outer gradients."""
ROUNDING = 1 + 1e-9


class SitePolicy(Settings):
    """Bounds on what a client takes part in.

    Attributes:
        min_members: So many clients' vectors are in a sum at least.
        max_share: The most that one client may count in a sum, as a share of all.
        max_model_norm: ‖w‖ is at most this.
        max_scale: A client's local steps, or its update, are multiplied by at most this.
        max_projections: How many ⟨λ, w_k − w^(t)⟩ it answers in all; by default a quarter of d.
        max_projections_a_round: How many of one model.
    """

    min_members: Annotated[int, Field(strict=True, ge=2)] = 2
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    max_model_norm: Positive = 1e6
    max_scale: Positive = 1e3
    max_projections: Natural | None = None
    max_projections_a_round: Count = 2

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> "SitePolicy":
        """Those settings of a node-config that are a site's, such as min-members; the rest by default."""
        given = {name: node_config.get(name.replace("_", "-")) for name in cls.model_fields}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def projections(self, params: int) -> int:
        """How many projections are answered in all, of a model of so many parameters."""
        return params // 4 if self.max_projections is None else self.max_projections

    def check_request(self, instruction: TrainInstruction, model: Tensor, params: int, weight: float = 1.0) -> None:
        """Refuse a model, a weight or a scale out of bounds; the message is the end of a sentence."""
        if tuple(model.shape) != (params,):
            raise InputError(f"is sent a model of shape {list(model.shape)}, and its own has {params} parameters.")
        norm = float(model.double().norm())
        if not norm <= self.max_model_norm:
            raise InputError(
                f"is sent a model of norm {norm:.3g}, and takes at most {self.max_model_norm:g} (max-model-norm)."
            )
        if not 0 <= weight <= ROUNDING:
            raise InputError(f"is to count with the weight {weight:g}, which is not between 0 and 1.")
        for scale in (instruction.step_scale, instruction.update_scale):
            if not 0 <= scale <= self.max_scale:
                raise InputError(
                    f"is to scale its training by {scale:g}, and takes 0 to {self.max_scale:g} (max-scale)."
                )

    def check_sum(self, terms: Sequence[str], scales: Sequence[float]) -> None:
        """Refuse a sum of too few, of things that do not belong together, or in which one counts nearly alone."""
        if len(terms) < self.min_members:
            raise InputError(
                f"takes part in sums of at least {self.min_members} clients, not of {len(terms)} (min-members)."
            )
        kinds = set(terms)
        if len(kinds) > 1 and not kinds <= ADJOINTS:
            raise InputError(f"does not add {' and '.join(sorted(kinds))} to one sum.")
        if not all(0 <= scale < math.inf for scale in scales):
            raise InputError("gets scales of a sum that are negative or not finite.")
        most, total = max(scales), sum(scales)
        if most > self.max_share * total * ROUNDING:
            raise InputError(
                f"takes part in sums in which nobody counts for more than {self.max_share:g} of all, not "
                f"{most / total:.3g} (max-share)."
            )


def chosen(members: Sequence[str], values: Sequence[Any], some: Collection[str]) -> list[Any]:
    """The values of some of the members."""
    return [value for member, value in zip(members, values, strict=True) if member in some]
