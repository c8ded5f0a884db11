import pytest
import torch

from fedunfold.core.errors import InputError
from fedunfold.server import sgd


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_it_adds_the_direction() -> None:
    model, state = sgd().update(vector(1.0, 2.0), vector(0.5, -1.0), ())
    assert model.tolist() == [1.5, 1.0]
    assert state == ()
    assert sgd().init(model) == ()


def test_a_learning_rate_scales_the_direction_and_its_adjoint() -> None:
    model, _ = sgd(lr=0.5).update(vector(1.0, 2.0), vector(0.5, -1.0), ())
    assert model.tolist() == [1.25, 1.5]
    to_model, to_direction, _ = sgd(lr=0.5).vjp(vector(1.0), vector(2.0), (), vector(3.0), ())
    assert (to_model.tolist(), to_direction.tolist()) == ([3.0], [1.5])


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_settings_are_refused(lr: float) -> None:
    with pytest.raises(InputError, match="sgd needs 0 < lr"):
        sgd(lr=lr)
