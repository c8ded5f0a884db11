"""Step for step what torch's own optimisers do."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.errors import InputError
from fedunfold.core.parts import LOCAL_OPTIMIZERS, LocalOptimizer
from fedunfold.local import adamw, clipped, decayed, momentum, nova, prox, sgd

Torch = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LR, STEPS = 0.1, 7


def steps_of_torch(start: Tensor, gradients: Tensor, make: Torch, max_norm: float) -> list[Tensor]:
    """Two parameters of one client, 3 and 4 entries of it."""
    params = [nn.Parameter(part.clone()) for part in torch.split(start, [3, 4])]
    optimizer, path = make(params), []
    for gradient in gradients:
        for param, part in zip(params, torch.split(gradient, [3, 4]), strict=True):
            param.grad = part.clone()
        nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        path.append(torch.cat([param.detach() for param in params]))
    return path


@pytest.mark.parametrize(
    ("optimizer", "make", "max_norm"),
    [
        (adamw(), lambda p: torch.optim.AdamW(p, LR), math.inf),
        (
            adamw(0.8, 0.9, 1e-3, 0.3),
            lambda p: torch.optim.AdamW(p, LR, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
            math.inf,
        ),
        (clipped(adamw(), 1.5), lambda p: torch.optim.AdamW(p, LR), 1.5),
        (clipped(sgd(), 1.5), lambda p: torch.optim.SGD(p, LR), 1.5),
        (decayed(sgd(), 0.3), lambda p: torch.optim.SGD(p, LR, weight_decay=0.3), math.inf),
        (decayed(momentum(0.7), 0.3), lambda p: torch.optim.SGD(p, LR, 0.7, weight_decay=0.3), math.inf),
        (clipped(decayed(momentum(0.7), 0.3), 2.0), lambda p: torch.optim.SGD(p, LR, 0.7, weight_decay=0.3), 2.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_step_is_that_of_torch(optimizer: LocalOptimizer, make: Torch, max_norm: float) -> None:
    """Two clients at once; some gradients are 0 and some norms below the largest."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    gradients = torch.randn(STEPS, 2, 7, generator=draw, dtype=torch.float64)
    gradients[0, 0, 2:5] = 0
    gradients[3] *= 0.1
    paths = [steps_of_torch(start[k], gradients[:, k], make, max_norm) for k in range(2)]
    params, state, lr = start, optimizer.init(start), torch.full((2, 1), LR, dtype=torch.float64)
    for step, gradient in enumerate(gradients):
        params, state = optimizer.step(params, gradient, state, lr, start)
        torch.testing.assert_close(params, torch.stack([path[step] for path in paths]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("optimizer", [adamw(eps=0.1), clipped(adamw(eps=0.1), 0.5), decayed(momentum(), 0.2)])
def test_derivatives_against_differences(optimizer: LocalOptimizer) -> None:
    draw = torch.Generator().manual_seed(4)
    params, *gradients = (torch.randn(2, 3, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4))

    def trained(start: Tensor, *gradients: Tensor) -> Tensor:
        now, state, lr = start, optimizer.init(start), torch.full((2, 1), 0.3, dtype=torch.float64)
        for gradient in gradients:
            now, state = optimizer.step(now, gradient, state, lr, start)
        return now

    assert torch.autograd.gradcheck(trained, (params, *gradients))


def test_parameters_without_a_gradient_yet_have_a_finite_derivative() -> None:
    """An adapter's first matrix has none in the first step: there d/dg of m̂/(√v̂ + ε) is 1/ε."""
    params, gradient = (torch.zeros(1, 2, dtype=torch.float64).requires_grad_() for _ in range(2))
    optimizer, lr = adamw(eps=0.25, weight_decay=0.0), torch.ones(1, 1, dtype=torch.float64)
    after, _ = optimizer.step(params, gradient, optimizer.init(params), lr, params)
    assert torch.autograd.grad(after.sum(), gradient)[0][0].tolist() == pytest.approx([-4.0, -4.0])


@pytest.mark.parametrize("settings", [{"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}, {"weight_decay": math.nan}])
def test_bad_settings_of_adamw_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="adamw needs"):
        adamw(**settings)


def test_bad_settings_of_wrappers_are_refused() -> None:
    with pytest.raises(InputError, match="clipped-sgd needs max_norm > 0, not 0"):
        clipped(sgd(), 0.0)
    with pytest.raises(InputError, match="decayed-sgd needs a finite weight_decay >= 0, not -1"):
        decayed(sgd(), -1.0)
    with pytest.raises(InputError, match="not adamw"):
        decayed(adamw())
    with pytest.raises(InputError, match="not nova"):
        clipped(nova())


def test_names_with_the_settings_of_both() -> None:
    named = LOCAL_OPTIMIZERS.parse("clipped-decayed-momentum:rho=0.5,max_norm=2,weight_decay=0.1")
    assert named == clipped(decayed(momentum(0.5), 0.1), 2.0)
    with pytest.raises(InputError, match="'clipped-prox': cannot read 'rho=1'; it takes mu, max_norm"):
        LOCAL_OPTIMIZERS.parse("clipped-prox:rho=1")
    assert LOCAL_OPTIMIZERS.parse("clipped-prox:mu=1") == clipped(prox(1.0))
