"""What holds for every server optimiser, and for one of somebody else's: its update is pure, and is differentiated."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.parts import SERVER_OPTIMIZERS, RoundInfo, ServerOptimizer, State
from fedunfold.server import adagrad, adam, grafted, momentum, sgd, yogi


@dataclass(frozen=True)
class Nesterov(ServerOptimizer):
    """m ← β m + u,  w ← w + u + β m: written as somebody outside would, without a vjp of its own."""

    name: ClassVar[str] = "nesterov"
    beta: float = 0.8

    def init(self, model: Tensor) -> State:
        return (torch.zeros_like(model),)

    def update(
        self, model: Tensor, direction: Tensor, state: State, info: RoundInfo | None = None
    ) -> tuple[Tensor, State]:
        m = self.beta * state[0] + direction
        return model + direction + self.beta * m, (m,)


ALL = [sgd(), sgd(0.5), momentum(0.7, 0.4), adam(0.3), yogi(0.3), adagrad(0.3), grafted(0.7), Nesterov()]
every = pytest.mark.parametrize("server", ALL, ids=str)


@every
def test_nothing_changes_in_place(server: ServerOptimizer) -> None:
    model, direction = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2.0], [0.5, -0.5]))
    state = server.init(model)
    before = [tensor.clone() for tensor in (model, direction, *state)]
    server.update(model, direction, state)
    server.vjp(model, direction, state, torch.ones_like(model), tuple(map(torch.ones_like, state)))
    assert all(torch.equal(*pair) for pair in zip(before, (model, direction, *state), strict=True))
    assert not model.requires_grad


@every
@settings(deadline=None)  # the first call into torch is slow
@given(seed=st.integers(0, 2**32 - 1))
def test_vjp_is_the_derivative_of_an_update(server: ServerOptimizer, seed: int) -> None:
    """Against central differences: ⟨adjoint, update(x + εs) − update(x − εs)⟩ / 2ε = ⟨vjp, s⟩."""
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(4, dtype=torch.float64, generator=random)

    def positive() -> Tensor:
        return 0.5 + torch.rand(4, dtype=torch.float64, generator=random)

    state: State = (positive(), positive())[: len(server.init(draw()))]
    # u² away from v, where yogi's sign jumps.
    inputs = (draw(), 2 + positive() if seed % 2 else 0.4 * torch.tanh(draw()), *state)
    shift = [draw() for _ in inputs]
    adjoint, adjoint_state = draw(), tuple(draw() for _ in state)

    def pairing(step: float) -> float:
        at = [x + step * s for x, s in zip(inputs, shift, strict=True)]
        model, new_state = server.update(at[0], at[1], tuple(at[2:]))
        pairs = zip((adjoint, *adjoint_state), (model, *new_state), strict=True)
        return float(sum((left @ right for left, right in pairs), torch.zeros(())))

    to_model, to_direction, to_state = server.vjp(inputs[0], inputs[1], state, adjoint, adjoint_state)
    slope = sum(float(a @ s) for a, s in zip((to_model, to_direction, *to_state), shift, strict=True))
    assert slope == pytest.approx((pairing(1e-5) - pairing(-1e-5)) / 2e-5, rel=1e-6, abs=1e-6)


@every
def test_vjps_chain_to_the_gradient_of_a_run(server: ServerOptimizer) -> None:
    """Five updates differentiated backwards one by one, against autograd through all of them."""
    random = torch.Generator().manual_seed(7)
    directions = torch.randn(5, 3, dtype=torch.float64, generator=random)
    end = torch.randn(3, dtype=torch.float64, generator=random)
    model = torch.randn(3, dtype=torch.float64, generator=random)

    leaves = directions.clone().requires_grad_()
    start = model.clone().requires_grad_()
    current, state = start, server.init(model)
    visited: list[tuple[Tensor, State]] = []
    for u in leaves:
        visited.append((current.detach(), tuple(part.detach() for part in state)))
        current, state = server.update(current, u, state)
    to_start, to_directions = torch.autograd.grad(current @ end, (start, leaves))

    adjoint, adjoint_state = end, tuple(map(torch.zeros_like, state))
    for t in reversed(range(5)):
        adjoint, to_direction, adjoint_state = server.vjp(
            visited[t][0], directions[t], visited[t][1], adjoint, adjoint_state
        )
        assert not adjoint.requires_grad
        torch.testing.assert_close(to_direction, to_directions[t], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(adjoint, to_start, rtol=1e-12, atol=1e-14)


@every
def test_it_is_made_again_from_its_description(server: ServerOptimizer) -> None:
    if server.name in SERVER_OPTIMIZERS.names():
        assert SERVER_OPTIMIZERS.make(**server.describe()) == server


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="unknown server optimiser 'plain'; choose one of sgd, adam, yogi, adagrad"):
        SERVER_OPTIMIZERS.make("plain")
