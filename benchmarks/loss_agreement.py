"""Which loss of a test agrees with its accuracy on which of two models is better: a rule is learned by a loss, and used
for accuracy.

In federations of the distribution that rules are learned on, others than those, some methods train a model each. Of
every two models of a federation whose accuracies differ by more than a point it is asked which one a loss prefers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.parts import SERVER_OPTIMIZERS
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.pretraining.distribution import Distribution
from fedunfold.pretraining.tempered_loss import TemperedLoss
from fedunfold.rules.size import size
from fedunfold.tasks.cross_entropy import cross_entropy_values
from fedunfold.training.loop import run_rounds

Log = Callable[[str], None]
RUN = "trial-0"
SERVERS = ("sgd", "sgd:lr=3", "momentum:beta=0.9,lr=1", "adam:lr=0.1,tau=0.001", "grafted:lr=3")
LEAST = 1.0
"""Models whose accuracies differ by less, in points, are as good as each other."""


def _tempered(logits: Tensor, labels: Tensor) -> Tensor:
    return TemperedLoss(logits.shape[-1]).losses(logits, labels)


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (torch.softmax(logits, -1) - torch.nn.functional.one_hot(labels, logits.shape[-1])).square().sum(-1)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy_values,
    "squared error of the probabilities": _squared_error,
    "the loss that rules are learned by": _tempered,
}


@dataclass(frozen=True)
class Row:
    """One loss.

    Attributes:
        loss: What it is called.
        agrees: Part of the pairs of models of which it prefers the one with the better accuracy.
        lost: Mean points of accuracy lost by taking the model of a pair that it prefers, over all pairs.
    """

    loss: str
    agrees: float
    lost: float


@dataclass(frozen=True)
class LossAgreement:
    """All losses, on the same pairs."""

    federations: int
    pairs: int
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_loss_agreement(federations: int, log: Log, distribution: Distribution | None = None) -> LossAgreement:
    """Train the models of so many federations, and ask each loss about every pair of them."""
    pairs = []
    for number in range(federations):
        log(f"federation {number + 1} of {federations}")
        found = _measured(distribution or Distribution(), number)
        pairs += [second - first for first, second in combinations(found, 2)]
    apart = torch.stack([pair for pair in pairs if abs(float(pair[0])) > LEAST])
    better = apart[:, 0] > 0
    rows = []
    for place, name in enumerate(LOSSES, 1):
        agrees = (apart[:, place] < 0) == better
        lost = torch.where(agrees, 0.0, apart[:, 0].abs())
        rows.append(Row(name, float(agrees.double().mean()), float(lost.mean())))
    return LossAgreement(federations, len(apart), rows)


def _measured(distribution: Distribution, number: int) -> list[Tensor]:
    """Accuracy in percent and every loss of the model of each server; models that diverge are left out."""
    drawn = distribution.draw(number, "losses")
    federation, found = SimulatedFederation(drawn.environment), []
    for server in SERVERS:
        algorithm = Algorithm(server=SERVER_OPTIMIZERS.parse(server), absent="drop")
        try:
            (result,) = run_rounds(federation, size(), drawn.environment.rounds, [RUN], algorithm=algorithm)
        except DivergenceError:
            continue
        with torch.no_grad():
            logits = federation.module(result.model)(federation.data.test_inputs).double()
        labels = federation.data.y_test
        losses = [float(loss(logits, labels).mean()) for loss in LOSSES.values()]
        found.append(torch.tensor([100 * float((logits.argmax(-1) == labels).double().mean()), *losses]))
    return found


def loss_agreement_page(found: LossAgreement) -> str:
    """What was measured, in Markdown."""
    lines = [
        "# Which loss agrees with the accuracy",
        "",
        f"Made by `python -m benchmarks losses`. In {found.federations} drawn federations the servers",
        f"{_listed()} train a model each,",
        "with weights by size. Of two models of a federation whose accuracies on its test differ by more",
        f"than {LEAST:g} point, which one does a loss on the same rows prefer? {found.pairs} pairs.",
        "",
        "| loss | prefers the more accurate one (%) | points of accuracy lost by its choice, on average |",
        "| --- | ---: | ---: |",
        *(f"| {row.loss} | {100 * row.agrees:.1f} | {row.lost:.2f} |" for row in found.rows),
    ]
    return "\n".join(lines) + "\n"


def _listed() -> str:
    return ", ".join(f"`{server}`" for server in SERVERS)
