"""What has to be the same in one process and over Flower, on digits with five clients and three rounds."""

from typing import Any

import torch

from fedunfold.config import environment
from fedunfold.core.federation import Federation
from fedunfold.core.task import OuterLoss
from fedunfold.rules import size
from fedunfold.training.loop import Algorithm, run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import unfold

ENV = environment("digits-label-skew").replace(rounds=3)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def everything(clients: Federation) -> dict[str, Any]:
    """Gradients of both kinds, learned weights, and the model trained with them."""
    start = clients.initial_model("learn-0")
    theta = torch.full((3, 5), 0.5, dtype=torch.float64)
    found: dict[str, Any] = {}
    for adjoint in ("first_order", "exact"):
        step = unfold(clients, theta, Algorithm(), OuterLoss("balanced"), adjoint, run="learn-0", model=start)
        found[adjoint] = step.gradient.tolist()
    learned = learn(clients, 3, learning=Learning(iterations=2))
    found["weights"] = learned.weights.tolist()
    found["model"] = run_rounds(clients, learned, 3).model.tolist()
    return found


def in_sums(clients: Federation) -> dict[str, Any]:
    """What a private federation can give as well as an open one, in fewer rounds."""
    theta, start = torch.full((1, 5), 0.5, dtype=torch.float64), clients.initial_model("learn-0")
    step = unfold(clients, theta, Algorithm(), OuterLoss("balanced"), "exact", run="learn-0", model=start)
    return {"private gradient": step.gradient.tolist(), "private model": run_rounds(clients, size(), 1).model.tolist()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], precision: str) -> None:
    """Relative to the size of each."""
    assert set(found) == set(expected) >= {"first_order", "exact", "weights", "model"}
    for name, values in found.items():
        there, here = (torch.tensor(v, dtype=torch.float64) for v in (values, expected[name]))
        error = float((there - here).norm() / here.norm())
        assert error <= TOLERANCE[precision], f"{name}: {error}"
