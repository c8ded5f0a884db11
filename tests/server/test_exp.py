"""FedExP by hand, its derivative, a run of both engines' reports, and where there are no norms."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import RoundInfo
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.server import exp
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import method
from tests.support.federations import RUN, assert_same, simulated, tiny
from tests.training.test_control_variates import SIZES, STEPS, full_batches, softmax_regression


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shown(coefficients: Tensor, norms: Tensor | None, layout: ParamLayout | None = None) -> RoundInfo:
    ones = torch.ones(len(coefficients), dtype=torch.int64)
    return RoundInfo(3, layout or ParamLayout(), coefficients, norms, ones, ones)


@pytest.mark.parametrize(
    ("deltas", "factor"),
    [
        ([[4.0, 0.0], [0.0, 2.0]], (0.25 * 16 + 0.75 * 4) / (2 * (1 + 2.25 + 0.05))),  # u = (1, 1.5)
        ([[4.0, 0.0], [-4.0, 0.0]], 16 / (2 * (4 + 0.05))),  # u = (−2, 0)
        ([[4.0, 0.0], [4.0, 0.0]], 1.0),  # clients who agree: half a step would be left, and 1 is the least
    ],
)
def test_by_hand(deltas: list[list[float]], factor: float) -> None:
    rows, shares = torch.tensor(deltas, dtype=torch.float64), vector(0.25, 0.75)
    u = shares @ rows
    model, state = exp(epsilon=0.05).update(vector(1.0, 2.0), u, (), shown(shares, rows.norm(dim=1)))
    torch.testing.assert_close(model, vector(1.0, 2.0) + factor * u)
    assert state == ()


def test_buffers_do_not_count_as_a_step() -> None:
    layout = ParamLayout(("w",), (torch.Size([1]),), ("running",), (torch.Size([1]),))
    model, _ = exp(epsilon=1.0).update(vector(0, 0), vector(1.0, 100.0), (), shown(vector(1.0), vector(4.0), layout))
    assert model[0].item() == pytest.approx(16 / (2 * 2))


def test_vjp_is_autograds_through_the_factor() -> None:
    """Coefficients and norms are constants; the factor is not."""
    random = torch.Generator().manual_seed(0)
    w, u, adjoint = (torch.randn(5, dtype=torch.float64, generator=random) for _ in range(3))
    norms, shares = vector(3.0, 5.0, 4.0), vector(0.2, 0.3, 0.5)
    to_model, to_direction, to_state = exp(0.1).vjp(w, u, (), adjoint, (), shown(shares, norms))
    leaf = u.clone().requires_grad_()
    factor = (shares @ norms**2) / (2 * (leaf @ leaf + 0.1))
    assert factor.item() > 1.1, "otherwise it is a constant"
    (expected,) = torch.autograd.grad(adjoint @ (factor * leaf), leaf)
    torch.testing.assert_close(to_direction, expected, rtol=1e-12, atol=0)
    assert torch.equal(to_model, adjoint) and to_state == ()


def test_a_run_extrapolates() -> None:
    federation = SimulatedFederation(tiny(), dtype=torch.float64)
    plain, longer = (
        run_rounds(federation, size(), 1, algorithm=Algorithm(server=server, absent="drop"))[0].model
        for server in (method("fedavg").algorithm.server, exp(epsilon=1e-9))
    )
    start = federation.initial_model("trial-0")
    ratio = (longer - start) / (plain - start)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))
    assert ratio.mean() > 1


def test_several_rounds_are_the_formula_written_out() -> None:
    """Softmax regression with full batches, in NumPy alone."""
    env, epsilon = full_batches(participation_probability=1.0), 0.01
    federation = simulated(env, softmax_regression)
    clients = [tuple(part.numpy() for part in env.load().client(k)) for k in range(len(SIZES))]
    shares = np.array([len(y) for _, y in clients]) / sum(len(y) for _, y in clients)
    w, factors = federation.initial_model(RUN).numpy().reshape(3, 5).copy(), []
    for _ in range(env.rounds):
        updates = []
        for (x, y), steps in zip(clients, STEPS.values(), strict=True):
            own = w.copy()
            for _ in range(steps):
                scores = np.exp(x @ own.T)
                wrong = scores / scores.sum(1, keepdims=True) - np.eye(3)[y]
                own -= env.lr * wrong.T @ x / len(y)
            updates.append(own - w)
        mean = np.tensordot(shares, updates, 1)
        squares = sum(p * np.sum(update**2) for p, update in zip(shares, updates, strict=True))
        factors.append(max(1.0, squares / (2 * (np.sum(mean**2) + epsilon))))
        w += factors[-1] * mean
    assert max(factors) > 1, "else it would be FedAvg"
    algorithm = Algorithm(server=exp(epsilon), absent="drop")
    (result,) = run_rounds(federation, size(), env.rounds, [RUN], algorithm=algorithm)
    assert_same(result.model, torch.from_numpy(w.ravel()))


def test_its_name_as_a_method() -> None:
    assert method("fedexp").algorithm.server == exp()


@pytest.mark.parametrize("info", [None, shown(vector(1.0), None)])
def test_without_norms_it_is_refused(info: Any) -> None:
    with pytest.raises(InputError, match="exp needs the norm of every client's update, which secure and remembered"):
        exp().update(vector(0.0), vector(1.0), (), info)


def test_a_run_that_remembers_is_refused_with_its_round() -> None:
    algorithm = Algorithm(server=exp(), absent="remember")
    with pytest.raises(InputError, match=r"round 0: server optimiser exp needs .*; take open updates"):
        run_rounds(SimulatedFederation(tiny()), size(), 1, algorithm=algorithm)


@pytest.mark.parametrize("epsilon", [0.0, float("nan"), float("inf")])
def test_bad_settings_are_refused(epsilon: float) -> None:
    with pytest.raises(InputError, match="exp needs 0 < epsilon"):
        exp(epsilon)
