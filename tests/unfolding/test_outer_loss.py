"""The table of outer losses."""

import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.tasks import classification, regression
from fedunfold.tasks.cross_entropy import cross_entropy, squared_error

NAMES = ["path", "sample", "balanced", "final", "final-balanced", "mse"]
COUNTS = torch.tensor([[10, 0, 0, 4], [0, 5, 0, 1]])


@pytest.mark.parametrize("name", ["balanced", "final-balanced"])
def test_class_weights_by_hand(name: str) -> None:
    """20 samples, 4 classes: 20/(4·10), 20/(4·5), none of the third, 20/(4·5)."""
    weights = OUTER_LOSSES.make(name).class_weights(COUNTS)
    assert weights is not None
    assert weights.tolist() == [0.5, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["path", "sample", "final", "mse"])
def test_other_losses_weigh_no_classes(name: str) -> None:
    assert OUTER_LOSSES.make(name).class_weights(torch.tensor([[1, 2]])) is None


def test_the_table() -> None:
    losses = [OUTER_LOSSES.make(name) for name in NAMES]
    assert [loss.name for loss in losses if loss.only_final] == ["final", "final-balanced"]
    assert [loss.name for loss in losses if not loss.per_epoch] == ["path", "mse"]
    assert [loss.name for loss in losses if loss.class_weights(COUNTS) is not None] == ["balanced", "final-balanced"]


def test_only_mse_is_a_squared_error() -> None:
    logits, labels = torch.tensor([[[0.3, -1.0, 2.0]]]), torch.tensor([[1]])
    for name in NAMES:
        losses, slopes = squared_error(logits, labels) if name == "mse" else cross_entropy(logits, labels)
        found, slopes_of = OUTER_LOSSES.make(name).values(classification(3), logits, labels, [1])
        assert torch.equal(found, losses)
        assert torch.equal(slopes_of(torch.full((1, 1), 0.5)), slopes * 0.5)


def test_squared_errors_of_probabilities_are_for_classes() -> None:
    with pytest.raises(InputError, match="the outer loss mse is for classification, not for regression"):
        OUTER_LOSSES.make("mse").values(regression(), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), [1])


def test_unknown_losses_are_refused() -> None:
    with pytest.raises(InputError, match="unknown outer loss 'likelihood'; choose one of path, sample"):
        OUTER_LOSSES.make("likelihood")
