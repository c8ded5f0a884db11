"""The loss that rules are judged by while they are learned."""

import math

import pytest
import torch

from fedunfold.pretraining.federations import JudgedOnHeldOut
from fedunfold.pretraining.tempered_loss import TemperedLoss
from fedunfold.tasks.cross_entropy import cross_entropy_values
from tests.pretraining.test_learner import SMALL, judged


def test_it_is_worked_out_by_hand() -> None:
    """p_y = 1/16 and 15/16: 4 (1 − 1/2), and 4 (1 − (15/16)^(1/4))."""
    logits = torch.tensor([[math.log(15.0), 0.0], [math.log(15.0), 0.0]], dtype=torch.float64)
    expected = [2.0, 4 * (1 - math.sqrt(math.sqrt(15)) / 2)]
    assert TemperedLoss(2).losses(logits, torch.tensor([1, 0])).tolist() == pytest.approx(expected)


def test_its_slopes_are_those_of_autograd() -> None:
    logits = (5 * torch.randn(2, 3, 4, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(4, (2, 3)), torch.rand(2, 3, dtype=torch.float64)
    task = TemperedLoss(4)
    values, slopes = task.values(logits.detach(), targets, [3, 3])
    losses = task.losses(logits, targets)
    torch.testing.assert_close(values, losses.detach(), rtol=0, atol=1e-12)
    (expected,) = torch.autograd.grad((weights * losses).sum(), logits)
    torch.testing.assert_close(slopes(weights), expected, rtol=0, atol=1e-12)


def test_a_certain_wrong_answer_costs_little_more_than_a_wrong_one() -> None:
    task, wrong = TemperedLoss(2), torch.tensor([1])
    sure, unsure = torch.tensor([[20.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    assert float(task.losses(sure, wrong) / task.losses(unsure, wrong)) < 3
    assert float(cross_entropy_values(sure, wrong) / cross_entropy_values(unsure, wrong)) > 9


def test_the_loss_of_a_test_is_the_mean_over_its_rows() -> None:
    """What FedAvg reached, which a rule's outer loss is compared with, is measured in the same way."""
    federation = JudgedOnHeldOut(SMALL.draw(0))
    model, data = federation.initial_model("trial-0"), federation.data
    with torch.no_grad():
        losses = TemperedLoss(data.task.num_outputs).losses(federation.module(model)(data.test_inputs), data.y_test)
    assert federation.evaluate([model])[0].loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert judged(federation, 1)[1].loss == pytest.approx(float(losses.mean()), rel=1e-5)
