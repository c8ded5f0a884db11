"""The outer optimiser against torch's."""

import pytest
import torch

from fedunfold.unfolding.state import Adam


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9)])
def test_same_steps_as_torch(betas: tuple[float, float]) -> None:
    stream = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, 3, 2, generator=stream, dtype=torch.float64)
    theta = torch.rand(3, 2, generator=stream, dtype=torch.float64)
    theirs = theta.clone().requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.03, betas=betas)
    state = Adam.start(theta, betas)
    for gradient in gradients:
        theta, state = state.step(theta, gradient, lr=0.03)
        theirs.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(theta, theirs.detach(), rtol=1e-12, atol=0)
