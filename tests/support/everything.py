"""What has to be the same in one process and over Flower, on digits with five clients and two rounds."""

from typing import Any, get_args

import torch
from torch import Tensor

from fedunfold.config import environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.federation import Federation
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad

ENV = environment("digits-label-skew").replace(rounds=2)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def everything(clients: Federation) -> dict[str, Any]:
    """Gradients of both kinds, learned weights, and the model trained with them."""
    theta = torch.full((ENV.rounds, 5), 0.5, dtype=torch.float64)
    found: dict[str, Any] = {}
    for adjoint in get_args(AdjointKind):
        found[adjoint] = gradient(clients, theta, adjoint, "learn-0")
    learned = learn(clients, ENV.rounds, learning=Learning(iterations=2))
    found["weights"] = learned.weights.tolist()
    found["model"] = run_rounds(clients, learned, ENV.rounds)[0].model.tolist()
    return found


def gradient(clients: Federation, theta: Tensor, adjoint: AdjointKind, run: str) -> list[Any]:
    """Of the balanced outer loss in θ."""
    start, outer = clients.initial_model(run), OUTER_LOSSES.make("balanced")
    (step,) = unroll_and_grad(clients, theta, Algorithm(), outer, adjoint, runs=[run], models=[start])
    found: list[Any] = step.gradient.tolist()
    return found


def in_sums(clients: Federation, name: str) -> dict[str, Any]:
    """What secure aggregation can give as well as an open federation, in fewer rounds; of every name once."""
    theta = torch.full((1, 5), 0.5, dtype=torch.float64)
    model = run_rounds(clients, size(), 1, [f"trial-{name}"])[0].model
    return {"secure gradient": gradient(clients, theta, "exact", f"learn-{name}"), "secure model": model.tolist()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], precision: str) -> None:
    """Relative to the size of each."""
    assert set(found) == set(expected) >= {"first_order", "exact", "weights", "model"}
    for name, values in found.items():
        there, here = (torch.tensor(v, dtype=torch.float64) for v in (values, expected[name]))
        error = float((there - here).norm() / here.norm())
        assert error <= TOLERANCE[precision], f"{name}: {error}"
