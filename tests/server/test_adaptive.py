import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer
from fedunfold.server import adagrad, adam, yogi

ADAPTIVE = [adam(0.3), yogi(0.3), adagrad(0.3)]
every = pytest.mark.parametrize("server", ADAPTIVE, ids=lambda server: server.name)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# With β₁ = β₂ = 1/2, τ = lr = 1, from w = 0, m = 0, v = 1: u = 2 makes m = 1, u = 1 then keeps m = 1.
@pytest.mark.parametrize(
    ("server", "v1", "v2"),
    [
        (adam(1.0, beta1=0.5, beta2=0.5, tau=1.0), 2.5, 1.75),  # 1/2 + 4/2, then 2.5/2 + 1/2
        (yogi(1.0, beta1=0.5, beta2=0.5, tau=1.0), 3.0, 2.5),  # 1 + 4/2 as 1 < 4, then 3 − 1/2 as 3 > 1
        (adagrad(1.0, beta1=0.5, tau=1.0), 5.0, 6.0),  # 1 + 4, then 5 + 1
    ],
    ids=["adam", "yogi", "adagrad"],
)
def test_two_updates_by_hand(server: ServerOptimizer, v1: float, v2: float) -> None:
    model = vector(0.0)
    state = server.init(model)
    assert [part.tolist() for part in state] == [[0.0], [1.0]]
    model, state = server.update(model, vector(2.0), state)
    assert model.item() == pytest.approx(1 / (math.sqrt(v1) + 1))
    assert [part.item() for part in state] == pytest.approx([1.0, v1])
    model, state = server.update(model, vector(1.0), state)
    assert model.item() == pytest.approx(1 / (math.sqrt(v1) + 1) + 1 / (math.sqrt(v2) + 1))
    assert [part.item() for part in state] == pytest.approx([1.0, v2])


def test_published_settings_by_hand() -> None:
    # m = 0.05, v = 0.99·10⁻⁶ + 0.01·0.25 = 0.00250099, √v + τ = 0.0510099: a step of 0.01·0.98020.
    server = adam()
    model, _ = server.update(vector(1.0), vector(0.5), server.init(vector(1.0)))
    assert model.item() == pytest.approx(1.0098020, abs=1e-7)


@every
def test_the_state_follows_the_model(server: ServerOptimizer) -> None:
    model = torch.zeros(3, dtype=torch.float32)
    assert {part.dtype for part in server.init(model)} == {torch.float32}


@every
def test_vjp_works_where_gradients_are_switched_off(server: ServerOptimizer) -> None:
    model = vector(1.0)
    with torch.no_grad():
        to_model, _, _ = server.vjp(model, model, server.init(model), model, (model, model))
    assert to_model.tolist() == [1.0]


@every
def test_coordinates_that_never_move_have_finite_derivatives(server: ServerOptimizer) -> None:
    still, state = vector(0.0), server.init(vector(0.0))
    for _ in range(100):
        still, state = server.update(still, vector(0.0), state)
    parts = server.vjp(still, vector(0.0), state, vector(1.0), (vector(1.0), vector(1.0)))
    assert still.item() == 0
    assert all(tensor.isfinite().all() for tensor in (parts[0], parts[1], *parts[2]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam", "lr": 0.0}, "adam needs 0 < lr"),
        ({"name": "adam", "lr": math.nan}, "adam needs 0 < lr"),
        ({"name": "yogi", "tau": 0.0}, "yogi needs 0 < tau"),
        ({"name": "yogi", "v0": -1.0}, "yogi needs a finite v0 >= 0, not -1"),
        ({"name": "adam", "beta1": 1.0}, "adam needs 0 <= beta1 < 1"),
        ({"name": "adam", "beta2": 1.0}, "adam needs 0 < beta2 < 1"),
        ({"name": "adagrad", "beta2": 0.5}, "adagrad' has no setting 'beta2'; it takes lr, beta1, tau"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SERVER_OPTIMIZERS.make(**settings)


def info_of(t: int) -> RoundInfo:
    return RoundInfo(t, ParamLayout(), *[torch.ones(1)] * 4)


def test_from_v0_with_the_bias_corrected_by_hand() -> None:
    """β₁ = β₂ = 1/2, from v = 0: u = 2 makes m = 1, v = 2; the exponents are 2 and 3."""
    server = adam(1.0, beta1=0.5, beta2=0.5, tau=1.0, v0=0, corrected=True)
    model, state = server.update(vector(0.0), vector(2.0), server.init(vector(0.0)), info_of(0))
    first = math.sqrt(3 / 4) / (3 / 4) / (math.sqrt(2) + 1)
    assert model.item() == pytest.approx(first)
    model, state = server.update(model, vector(1.0), state, info_of(1))
    assert [part.item() for part in state] == pytest.approx([1.0, 1.5])
    assert model.item() == pytest.approx(first + math.sqrt(7 / 8) / (7 / 8) / (math.sqrt(1.5) + 1))
    with pytest.raises(InputError, match="corrects by the round"):
        server.update(model, model, state)
    assert SERVER_OPTIMIZERS.parse("adam:v0=0,corrected=1") == adam(v0=0, corrected=True)


@pytest.mark.parametrize("server", [adam(v0=0), yogi(v0=0), adagrad(v0=0)], ids=lambda server: server.name)
def test_from_v0_of_nothing_a_coordinate_that_never_moves_has_finite_derivatives(server: ServerOptimizer) -> None:
    still = vector(0.0, 1.0)
    _, state = server.update(still, vector(0.0, 0.5), server.init(still))
    parts = server.vjp(still, vector(0.0, 0.5), state, still, (still, still))
    assert all(tensor.isfinite().all() for tensor in (parts[0], parts[1], *parts[2]))
