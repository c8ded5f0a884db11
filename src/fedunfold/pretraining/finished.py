"""What pre-training leaves: the rule, with what it is for, and a card that says what was measured."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.parts import SERVER_OPTIMIZERS
from fedunfold.core.text_table import markdown_table
from fedunfold.pretraining.learner import GAINS, MARGIN, Pretraining, Progress
from fedunfold.rules.parametric import ParametricRule
from fedunfold.version import VERSION

_SEEN = (
    "It reads the update of every client, so the server has to see them: no secure aggregation.",
    "It reads numbers that clients report and the sums of their updates, no update alone: it works with secure sums.",
)


def finished_rule(settings: Pretraining, progress: Progress) -> ParametricRule:
    """The best rule that was found, with its name and with what it is for.

    Args:
        settings: How it was learned.
        progress: Where learning ended.
    """
    chosen, met = progress.chosen, len(progress.losses) * settings.federations
    absent: Absent = "drop" if settings.family == "private-network" else "remember"
    return replace(
        progress.rule,
        name=settings.name,
        algorithm=Algorithm(server=SERVER_OPTIMIZERS.parse(settings.server), absent=absent),
        description=(
            f"Learned over {met} drawn federations; on {chosen.federations} drawn apart {chosen.mean:+.2f} points of "
            f"test accuracy above FedAvg, {chosen.worst:+.2f} in the worst tenth."
        ),
    )


def card(settings: Pretraining, progress: Progress) -> str:
    """The model card, in Markdown.

    Args:
        settings: How the rule was learned.
        progress: Where learning ended.
    """
    rule, chosen = finished_rule(settings, progress), progress.chosen
    assert rule.algorithm is not None and rule.ranges is not None
    features = [("client", name) for name in rule.client_features] + [("round", name) for name in rule.round_features]
    values = settings.model_dump(mode="json")
    distribution = values.pop("distribution")
    measured = [
        ("mean gain, last rounds", f"{chosen.mean:+.2f}"),
        ("mean gain, worst tenth of the federations", f"{chosen.worst:+.2f}"),
        ("mean gain over all rounds", f"{chosen.path:+.2f}"),
        ("mean gain over all rounds, worst tenth of the federations by it", f"{chosen.worst_path:+.2f}"),
        ("federations with a gain (%; within 0.25 points counts half)", f"{100 * chosen.wins:.1f}"),
    ]
    path = [(made.step, *(f"{v:+.2f}" for v in made.gains)) for made in progress.validations]
    ends = zip(features, *rule.ranges.tolist(), strict=True)
    ranges = [(name, of, f"{low:.3g}", f"{high:.3g}") for (of, name), low, high in ends]
    return f"""# {rule.name}

A rule that reads a round of federated learning and decides how much each client counts, on a step size, on a momentum
and on how far the server's optimiser is trusted.

{rule.description}

- Parameters: {sum(value.numel() for value in rule.params.values())}
- For the server optimiser `{settings.server}`; absent clients: {rule.algorithm.absent}
- Local training: plain {rule.algorithm.local.name}
- Made with fedunfold {VERSION}, `fedunfold pretrain`

## What was measured

Points of test accuracy above FedAvg on {chosen.federations} federations drawn apart, which were not learned on. Where
the rule diverges its score is 0; those where FedAvg does are left out. The rule is the one that did best there, after
step {chosen.step} of {len(progress.losses)}, so they flatter it a little.

{markdown_table(("on the federations drawn apart", "value"), measured)}
{markdown_table(("after step", *GAINS), path)}
## What it reads

Each feature with the range in which the rule decides freely: what was met in validation, and {100 * MARGIN:.0f} % of
its length more on either side.

{markdown_table(("feature", "of", "from", "to"), ranges)}
## What it was learned on

Every federation is drawn anew from these; ranges are drawn uniformly in the logarithm.

{markdown_table(("distribution", "value"), _rows(distribution))}
{markdown_table(("setting", "value"), _rows(values))}
## Limits

- Beyond the federations above, small models on generated rows and pictures and on handwritten digits, nothing was
  measured here.
- In the worst tenth it gained {chosen.worst:+.2f} points: compare it with fedavg before you rely on it.
- Outside its ranges it leans back towards weights by size, and a run says so in a warning.
- {_SEEN[settings.family == "private-network"]}
"""


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranges = {name: " to ".join(map(str, value)) for name, value in values.items() if isinstance(value, list)}
    return [(name, ranges.get(name, str(value))) for name, value in values.items()]
