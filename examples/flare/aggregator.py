"""Any weighting rule behind the three methods of NVIDIA FLARE's `ModelAggregator`.

Derive from FLARE's class in the place of `object` and return an `FLModel(params=…, params_type=ParamsType.DIFF)`:
clients send differences (`params_transfer_type=TransferType.DIFF`), and FLARE adds what is returned to its model.
"""

from typing import Any

from fedunfold.rules.rule import WeightingRule
from fedunfold.rules.step import step


class RuleAggregator:
    """Collects a round's models and lets a rule make one difference of them."""

    def __init__(self, rule: WeightingRule) -> None:
        self.rule, self.state, self.models = rule, None, []  # type: Any, Any, list[Any]

    def accept_model(self, model: Any) -> None:
        self.models.append(model)

    def aggregate_model(self) -> dict[str, Any]:
        names = list(self.models[0].params)
        updates = [[model.params[name] for name in names] for model in self.models]
        examples = [model.meta["NUM_STEPS_CURRENT_ROUND"] for model in self.models]
        clients = [model.meta["client_name"] for model in self.models]
        update, _, self.state = step(self.rule, updates, examples, self.state, client_ids=clients)
        return dict(zip(names, update, strict=True))

    def reset_stats(self) -> None:
        self.models = []
