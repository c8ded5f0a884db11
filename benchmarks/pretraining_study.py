"""What helps in learning a rule: short pre-trainings that differ from the usual one in one thing each.

All see the same federations, far fewer than the rule that comes with the package, and are validated on the same ones
drawn apart, by the gains over FedAvg that the card of a rule has too.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

from benchmarks.rule_designs import (
    Attending,
    Curriculum,
    Deeper,
    LongSteps,
    WithoutLastStep,
    WithoutUnevenness,
)
from fedunfold.core.processes import worker_pool
from fedunfold.pretraining import distribution
from fedunfold.pretraining.learner import GAINS, Pretraining, Validation, pretrain
from fedunfold.pretraining.tempered_loss import TemperedLoss
from fedunfold.rules.families import FAMILIES
from fedunfold.rules.unfolded import UnfoldedRule
from fedunfold.tasks.classification import Classification

Log = Callable[[str], None]
SHORT: Mapping[str, Any] = {"steps": 28, "federations": 16, "validation": 144}


@dataclass(frozen=True)
class Variant:
    """What is different in a pre-training.

    Attributes:
        settings: Fields of `Pretraining`.
        design: The rule in the place of the network.
        curriculum: Whether few clients and rounds come first.
        judge: What held-out rows are classified under.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    design: type[UnfoldedRule] = UnfoldedRule
    curriculum: bool = False
    judge: type[Classification] = TemperedLoss

    def pretraining(self) -> Pretraining:
        """All settings."""
        settings = Pretraining(**{**SHORT, **self.settings})
        count = settings.steps * settings.federations
        drawn = settings.distribution
        if self.curriculum:
            drawn = Curriculum(**drawn.model_dump(), federations=count)
        return settings.model_copy(update={"every": settings.steps, "distribution": drawn})


AS_IT_IS = "as it is by default"
ANOTHER_BEGINNING = "the same from another beginning"
VARIANTS: Mapping[str, Variant] = {
    AS_IT_IS: Variant(),
    ANOTHER_BEGINNING: Variant({"seed": 1}),
    "attention between clients": Variant(design=Attending),
    "a second layer that sees all clients": Variant(design=Deeper),
    "few clients and rounds first": Variant(curriculum=True),
    "steps of up to e⁴ times plain averaging's": Variant(design=LongSteps),
    "without its last step size": Variant(design=WithoutLastStep),
    "without unevenness": Variant(design=WithoutUnevenness),
    "gradients of first order": Variant({"adjoint": "first_order"}),
    "judged by the cross-entropy": Variant(judge=Classification),
    "all rounds count alike": Variant({"lateness": 0.0}),
    "harm counts no more than gain": Variant({"caution": 1.0}),
    "gradients hardly clipped": Variant({"clip": 10.0}),
    "layers of 16": Variant({"width": 16}),
    "coordinates evened out more": Variant({"server": "grafted:damping=0.1"}),
    "a plain server": Variant({"server": "sgd"}),
    "a server with Adam": Variant({"server": "adam"}),
    "what secure sums show": Variant({"family": "private-network"}),
    "a formula": Variant({"family": "formula"}),
}


@dataclass(frozen=True)
class Row:
    """One pre-training.

    Attributes:
        name: What was different.
        found: The validation after its last step.
    """

    name: str
    found: Validation


@dataclass(frozen=True)
class PretrainingStudy:
    """All that was learned."""

    settings: Pretraining
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        rows = [{"name": row.name, **asdict(row.found)} for row in self.rows]
        return {"settings": self.settings.model_dump(mode="json"), "rows": rows}


def measure_pretraining(chosen: Sequence[str], log: Log) -> PretrainingStudy:
    """Learn the variants of these names, each from the beginning, and as many at a time as there are processors."""
    found = {}
    with worker_pool(min(len(chosen), os.cpu_count() or 1)) as pool:
        waiting = {pool.submit(validated, VARIANTS[name]): name for name in chosen}
        for learned in as_completed(waiting):
            found[waiting[learned]] = learned.result()
            log(f"{len(found)} of {len(chosen)}: {waiting[learned]}, {found[waiting[learned]]}")
    return PretrainingStudy(Pretraining(**SHORT), [Row(name, found[name]) for name in chosen])


def validated(variant: Variant) -> Validation:
    """Learn a variant, in this process alone."""
    with patch.dict(FAMILIES, network=variant.design), patch.object(distribution, "TemperedLoss", variant.judge):
        return pretrain(variant.pretraining()).validations[-1]


def pretraining_page(study: PretrainingStudy) -> str:
    """What was learned, in Markdown."""
    seen = study.settings.steps * study.settings.federations
    mean = {row.name: row.found.mean for row in study.rows}
    chance = []
    if {AS_IT_IS, ANOTHER_BEGINNING} <= mean.keys():
        apart = abs(mean[AS_IT_IS] - mean[ANOTHER_BEGINNING])
        chance = [
            f"Two beginnings alone are {apart:.1f} points apart in the mean gain: what differs by less may be chance.",
            "",
        ]
    lines = [
        "# What helps in learning a rule",
        "",
        "Made by `python -m benchmarks pretraining`. Each line is a rule learned from the beginning over the same",
        f"{seen:,} drawn federations, or the first of them, which differs in one thing; it is validated on the same",
        f"{study.rows[0].found.federations} federations drawn apart, in points of test accuracy above FedAvg. The rule",
        "that comes with the package is learned for longer: differences here tell which way is better, not how far it",
        "leads.",
        "",
        *chance,
        f"| what is different | {' | '.join(GAINS)} | federations with a gain (%) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.name} | {' | '.join(f'{gain:+.2f}' for gain in row.found.gains)} | {100 * row.found.wins:.0f} |"
            for row in study.rows
        ),
    ]
    return "\n".join(lines) + "\n"
