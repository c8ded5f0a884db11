"""What pre-training leaves: the rule with what it is for, and the numbers of its card."""

import torch

from fedunfold.pretraining.finished import card, finished_rule
from fedunfold.pretraining.learner import Pretraining, Progress, Validation
from fedunfold.rules.unfolded import initial_parameters
from fedunfold.server import adam
from fedunfold.unfolding.state import Adam
from tests.support.rules import FEATURES

SETTINGS = Pretraining(name="mine@3", steps=6, federations=5, validation=40, every=3, width=4, server="adam:lr=0.02")
VALIDATIONS = Validation(3, 1.25, -0.75, 1.0, -0.5, 0.625, 8), Validation(6, 1.5, -2.0, 1.25, 0.25, 0.6, 8)


def ended() -> Progress:
    params = initial_parameters(4, 0)
    ranges = torch.tensor([[0.0], [2.0]], dtype=torch.float64).expand(2, len(FEATURES))
    optimizer = Adam.start(torch.zeros(1), (0.9, 0.99))
    return Progress(params, params, optimizer, (1.0,) * 6, VALIDATIONS, params, ranges)


def test_the_rule_knows_what_it_is_for() -> None:
    rule = finished_rule(SETTINGS, ended())
    assert rule.algorithm is not None
    assert (rule.name, rule.algorithm.server, rule.algorithm.absent) == ("mine@3", adam(lr=0.02), "remember")
    assert rule.description == (
        "Learned over 30 drawn federations; on 8 drawn apart +1.25 points of test accuracy above FedAvg, -0.75 in the "
        "worst tenth."
    )


def test_the_card_has_what_was_measured() -> None:
    """The first validation has the largest value; ranges are widened by a quarter of their length."""
    text = card(SETTINGS, ended())
    for line in (
        "# mine@3",
        "| mean gain, last rounds | +1.25 |",
        "| mean gain, worst tenth of the federations | -0.75 |",
        "| mean gain over all rounds | +1.00 |",
        "| mean gain over all rounds, worst tenth of the federations by it | -0.50 |",
        "| federations with a gain (%; within 0.25 points counts half) | 62.5 |",
        "| 6 | +1.50 | -2.00 | +1.25 | +0.25 |",
        "| size | client | -0.5 | 2.5 |",
        "| effort | round | -0.5 | 2.5 |",
        "| clients | 3 to 24 |",
        "| server | adam:lr=0.02 |",
    ):
        assert line in text.splitlines(), line
    assert "after step 3 of 6" in " ".join(text.split())
