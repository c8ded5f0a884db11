"""What helps in learning a rule: short pre-trainings that differ from the usual one in one thing each.

All see the same federations, far fewer than the rule that comes with the package, and are validated on the same ones
drawn apart, by the gains over FedAvg that the card of a rule has too.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedunfold.pretraining.learner import Pretraining, Validation, pretrain

Log = Callable[[str], None]
SHORT: Mapping[str, Any] = {"steps": 80, "federations": 16, "validation": 144}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is by default": {},
    "gradients of first order": {"adjoint": "first_order"},
    "all rounds count alike": {"lateness": 0.0},
    "harm counts no more than gain": {"caution": 1.0},
    "gradients hardly clipped": {"clip": 10.0},
    "layers of 16": {"width": 16},
    "a plain server": {"server": "sgd"},
    "a server with Adam": {"server": "adam"},
    "what secure sums show": {"family": "private-network"},
    "a formula": {"family": "formula"},
    "five times as many steps, a fifth of the federations in each": {"steps": 400, "federations": 3},
}
"""What is different, in fields of `Pretraining`."""


@dataclass(frozen=True)
class Variant:
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
    rows: Sequence[Variant]

    def as_json(self) -> dict[str, Any]:
        rows = [{"name": row.name, **asdict(row.found)} for row in self.rows]
        return {"settings": self.settings.model_dump(mode="json"), "rows": rows}


def measure_pretraining(chosen: Sequence[str], log: Log) -> PretrainingStudy:
    """Learn the variants of these names, each from the beginning."""
    rows = []
    for name in chosen:
        log(name)
        settings = Pretraining(**{**SHORT, **VARIANTS[name]})
        settings = settings.model_copy(update={"every": settings.steps})
        learned = pretrain(settings, processes=os.cpu_count() or 1)
        rows.append(Variant(name, learned.validations[-1]))
    return PretrainingStudy(Pretraining(**SHORT), rows)


def pretraining_page(study: PretrainingStudy) -> str:
    """What was learned, in Markdown."""
    seen = study.settings.steps * study.settings.federations
    lines = [
        "# What helps in learning a rule",
        "",
        "Made by `python -m benchmarks pretraining`. Each line is a rule learned from the beginning over the same",
        f"{seen:,} drawn federations, or the first of them, which differs in one thing; it is validated on the same",
        f"{study.rows[0].found.federations} federations drawn apart, in points of test accuracy above FedAvg. The rule",
        "that comes with the package is learned for longer: differences here tell which way is better, not how far it",
        "leads.",
        "",
        "| what is different | mean gain | worst tenth | all rounds | federations with a gain (%) |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.name} | {row.found.mean:+.2f} | {row.found.worst:+.2f} | {row.found.path:+.2f} "
            f"| {100 * row.found.wins:.0f} |"
            for row in study.rows
        ),
    ]
    return "\n".join(lines) + "\n"
