import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.server.optimizers import ServerOptimizer, ServerState, adagrad, adam, momentum, plain, yogi

ADAPTIVE = [adam(0.3), yogi(0.3), adagrad(0.3)]
ALL = [plain(), *ADAPTIVE]
names = pytest.mark.parametrize("server", ALL, ids=lambda server: server.name)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_plain_adds_the_direction() -> None:
    model, state = plain().step(vector(1.0, 2.0), vector(0.5, -1.0), ())
    assert model.tolist() == [1.5, 1.0]
    assert state == ()
    assert plain().initial_state(model) == ()


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
def test_two_steps_by_hand(server: ServerOptimizer, v1: float, v2: float) -> None:
    model = vector(0.0)
    state = server.initial_state(model)
    assert [part.tolist() for part in state] == [[0.0], [1.0]]
    model, state = server.step(model, vector(2.0), state)
    assert model.item() == pytest.approx(1 / (math.sqrt(v1) + 1))
    assert [part.item() for part in state] == pytest.approx([1.0, v1])
    model, state = server.step(model, vector(1.0), state)
    assert model.item() == pytest.approx(1 / (math.sqrt(v1) + 1) + 1 / (math.sqrt(v2) + 1))
    assert [part.item() for part in state] == pytest.approx([1.0, v2])


def test_published_settings_by_hand() -> None:
    # m = 0.05, v = 0.99·10⁻⁶ + 0.01·0.25 = 0.00250099, √v + τ = 0.0510099: a step of 0.01·0.98020.
    server = adam()
    model, _ = server.step(vector(1.0), vector(0.5), server.initial_state(vector(1.0)))
    assert model.item() == pytest.approx(1.0098020, abs=1e-7)


@names
def test_nothing_changes_in_place(server: ServerOptimizer) -> None:
    model, direction = vector(1.0, 2.0), vector(0.5, -0.5)
    state = server.initial_state(model)
    before = [tensor.clone() for tensor in (model, direction, *state)]
    server.step(model, direction, state)
    server.vjp(model, direction, state, torch.ones_like(model), tuple(map(torch.ones_like, state)))
    assert all(torch.equal(*pair) for pair in zip(before, (model, direction, *state), strict=True))
    assert not model.requires_grad


@pytest.mark.parametrize("server", ADAPTIVE, ids=lambda server: server.name)
def test_the_state_follows_the_model(server: ServerOptimizer) -> None:
    model = torch.zeros(3, dtype=torch.float32)
    assert {part.dtype for part in server.initial_state(model)} == {torch.float32}


@names
@settings(deadline=None)  # the first call into torch is slow
@given(seed=st.integers(0, 2**32 - 1))
def test_vjp_is_the_derivative_of_a_step(server: ServerOptimizer, seed: int) -> None:
    """Against central differences: ⟨adjoint, step(x + εs) − step(x − εs)⟩ / 2ε = ⟨vjp, s⟩."""
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(4, dtype=torch.float64, generator=random)

    def positive() -> Tensor:
        return 0.5 + torch.rand(4, dtype=torch.float64, generator=random)

    state: ServerState = () if server.name == "plain" else (draw(), positive())
    # u² away from v, where yogi's sign jumps.
    inputs = (draw(), 2 + positive() if seed % 2 else 0.4 * torch.tanh(draw()), *state)
    shift = [draw() for _ in inputs]
    adjoint, adjoint_state = draw(), tuple(draw() for _ in state)

    def pairing(step: float) -> float:
        at = [x + step * s for x, s in zip(inputs, shift, strict=True)]
        model, new_state = server.step(at[0], at[1], tuple(at[2:]))
        pairs = zip((adjoint, *adjoint_state), (model, *new_state), strict=True)
        return float(sum((left @ right for left, right in pairs), torch.zeros(())))

    to_model, to_direction, to_state = server.vjp(inputs[0], inputs[1], state, adjoint, adjoint_state)
    slope = sum(float(a @ s) for a, s in zip((to_model, to_direction, *to_state), shift, strict=True))
    assert slope == pytest.approx((pairing(1e-5) - pairing(-1e-5)) / 2e-5, rel=1e-6, abs=1e-6)


@names
def test_vjps_chain_to_the_gradient_of_a_run(server: ServerOptimizer) -> None:
    """Five steps walked backwards one by one, against autograd through all of them."""
    random = torch.Generator().manual_seed(7)
    directions = torch.randn(5, 3, dtype=torch.float64, generator=random)
    end = torch.randn(3, dtype=torch.float64, generator=random)
    model = torch.randn(3, dtype=torch.float64, generator=random)

    leaves = directions.clone().requires_grad_()
    start = model.clone().requires_grad_()
    current, state = start, server.initial_state(model)
    visited: list[tuple[Tensor, ServerState]] = []
    for u in leaves:
        visited.append((current.detach(), tuple(part.detach() for part in state)))
        current, state = server.step(current, u, state)
    to_start, to_directions = torch.autograd.grad(current @ end, (start, leaves))

    adjoint, adjoint_state = end, tuple(map(torch.zeros_like, state))
    for t in reversed(range(5)):
        adjoint, to_direction, adjoint_state = server.vjp(
            visited[t][0], directions[t], visited[t][1], adjoint, adjoint_state
        )
        assert not adjoint.requires_grad
        torch.testing.assert_close(to_direction, to_directions[t], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(adjoint, to_start, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("server", ADAPTIVE, ids=lambda server: server.name)
def test_vjp_works_where_gradients_are_switched_off(server: ServerOptimizer) -> None:
    model = vector(1.0)
    with torch.no_grad():
        to_model, _, _ = server.vjp(model, model, server.initial_state(model), model, (model, model))
    assert to_model.tolist() == [1.0]


@pytest.mark.parametrize("server", ADAPTIVE, ids=lambda server: server.name)
def test_coordinates_that_never_move_have_finite_derivatives(server: ServerOptimizer) -> None:
    still, state = vector(0.0), server.initial_state(vector(0.0))
    for _ in range(100):
        still, state = server.step(still, vector(0.0), state)
    parts = server.vjp(still, vector(0.0), state, vector(1.0), (vector(1.0), vector(1.0)))
    assert still.item() == 0
    assert all(tensor.isfinite().all() for tensor in (parts[0], parts[1], *parts[2]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "unknown server optimiser 'sgd'; choose one of plain, momentum, adam"),
        ({"name": "plain", "lr": 0.5}, "plain averaging has no learning rate"),
        ({"name": "adam", "lr": 0.0}, "adam needs 0 < lr"),
        ({"name": "adam", "lr": math.nan}, "adam needs 0 < lr"),
        ({"name": "yogi", "tau": 0.0}, "yogi needs 0 < tau"),
        ({"name": "adam", "beta1": 1.0}, "adam needs 0 <= beta1 < 1"),
        ({"name": "adam", "beta2": 1.0}, "adam needs 0 < beta2 < 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerOptimizer(**settings)


def test_momentum_by_hand() -> None:
    """m: 1 → 0.5·1 + 2 = 2.5;  w: 0 → 1 → 3.5."""
    optimizer = momentum(0.5)
    w, state = torch.zeros(1), optimizer.initial_state(torch.zeros(1))
    w, state = optimizer.step(w, torch.tensor([1.0]), state)
    w, state = optimizer.step(w, torch.tensor([2.0]), state)
    assert (w.item(), state[0].item()) == (3.5, 2.5)
