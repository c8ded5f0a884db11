"""Oddities by hand, and in runs and weight-learning runs that have them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, TrainRequest
from fedunfold.core.outcomes import RejectedUpdate
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.core.warnings import of_learning, of_run
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import _check_finite, unroll_and_grad
from tests.support.federations import simulated, tiny

ALWAYS = torch.ones(5, 2, dtype=torch.bool)
EVEN = torch.full((4, 3), 1 / 3, dtype=torch.float64)
STEEP = torch.ones(4, 3, dtype=torch.float64)
NOBODY = torch.zeros(3, dtype=torch.long)


def test_nothing_odd() -> None:
    assert of_run(ALWAYS, ALWAYS, (), 0) == ()
    assert of_learning("abc", EVEN, STEEP, 1e-8, NOBODY, 40) == ()


def test_who_was_rejected_when_and_why() -> None:
    entries = [RejectedUpdate(0, "a", "is small"), RejectedUpdate(1, "b", "is odd"), RejectedUpdate(3, "a", "is large")]
    assert of_run(ALWAYS, ALWAYS, entries, 0) == (
        "client a was rejected in rounds 1 and 4 of 5: it is large.",
        "client b was rejected in round 2 of 5: it is odd.",
    )
    often = [RejectedUpdate(t, "a", "is large") for t in range(20)]
    assert "in 20 rounds from 1 to 20 of 30" in of_run(torch.ones(30, 1, dtype=torch.bool), ALWAYS, often, 0)[0]


@pytest.mark.parametrize(
    ("here", "named"),
    [("10001", None), ("100001", "rounds 2 to 5 of 6"), ("0000", "rounds 1 to 4 of 4"), ("010000", "rounds 3 to 6")],
)
def test_nobody_participates_for_many_rounds(here: str, named: str | None) -> None:
    participated = torch.tensor([[mark == "1", False] for mark in here])
    found = of_run(participated, participated, (), 0)
    assert bool(found) == (named is not None)
    assert named is None or (named in found[0] and "remember absent clients" in found[0])


def test_too_few_for_a_step() -> None:
    entering = torch.tensor([[True, True], [True, False]])
    (line,) = of_run(entering, entering, (), 2)
    assert line.startswith("there was no step in round 2, with fewer than the 2 updates")


def test_weight_on_one_client_and_gradients_that_vanish() -> None:
    weights, slopes = EVEN.clone(), STEEP.clone()
    weights[1:3] = torch.tensor([0.002, 0.996, 0.002])
    slopes[3] = 1e-12
    alone, still = of_learning("abc", weights, slopes, 1e-8, NOBODY, 40)
    assert alone.startswith("client b has more than 99 % of the weight in rounds 2 and 3:")
    assert "kl_weight=0.1" in alone
    assert still.startswith("the gradient of the weights vanished in round 4,")
    assert of_learning("abc", EVEN, STEEP, 1e-8, torch.tensor([0, 0, 7]), 40)[0].startswith(
        "while learning, client c was rejected in 7 of 40 rounds;"
    )
    assert of_learning("a", torch.ones(4, 1), torch.zeros(4, 1), 1e-8, torch.tensor([0]), 40) == ()


def test_a_run_in_which_nobody_participates_says_so() -> None:
    (result,) = run_rounds(simulated(tiny(participation_probability=0.0)), size(), 5)
    assert result.warnings[0].startswith("nobody participated in rounds 1 to 5 of 5;")
    assert run_rounds(simulated(tiny()), size(), 5)[0].warnings == ()


def test_learning_without_participants_has_no_gradient(tmp_path: Path) -> None:
    learned = learn(simulated(tiny(participation_probability=0.0)), 3, learning=Learning(iterations=2))
    assert learned.warnings[0].startswith("the gradient of the weights vanished in rounds 1, 2 and 3")
    torch.testing.assert_close(learned.weights, learned.history[0])
    learned.save(tmp_path / "weights.safetensors")
    assert LearnedWeights.load(tmp_path / "weights.safetensors").warnings == learned.warnings


def test_who_was_rejected_while_learning_is_counted_over_an_interruption(tmp_path: Path) -> None:
    env = tiny(dict.fromkeys("abcdef", 9), epochs=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300
    learning, algorithm = Learning(iterations=3), Algorithm(filter="norm", absent="drop")

    class Killed(Exception):
        pass

    def kill(so_far: LearnedWeights) -> None:
        if len(so_far.losses) == 2:
            raise Killed

    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        learn(
            simulated(env),
            2,
            algorithm=algorithm,
            learning=learning,
            checkpoint=file,
            checkpoint_seconds=0,
            on_iteration=kill,
        )
    found = learn(simulated(env), 2, algorithm=algorithm, learning=learning, checkpoint=file)
    assert found.warnings == learn(simulated(env), 2, algorithm=algorithm, learning=learning).warnings
    assert found.warnings[0].startswith("while learning, client f was rejected in 6 of 6 rounds;")


class Overflowing(SimulatedFederation):
    """Where numbers that are too large for their type come from: the outer loss met, or the backward pass."""

    def __init__(self, overflows: str) -> None:
        super().__init__(tiny(), dtype=torch.float32)
        self.overflows = overflows

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        reports = super().train(requests)
        return [self._overflown(*of_run) for of_run in zip(requests, reports, strict=True)]

    def _overflown(self, request: TrainRequest, report: ClientUpdates) -> ClientUpdates:
        outer = report.outer
        if self.overflows == "outer gradient" and request.round == 1 and outer.gradient is not None:
            return replace(report, outer=replace(outer, gradient=outer.gradient * math.inf))
        return replace(report, outer=replace(outer, loss=math.inf)) if self.overflows == "loss" else report

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        huge = 1e30 if self.overflows == "adjoint" else 1.0
        return [huge * (huge * part) for part in super().vjp(requests, participated, adjoints)]


def test_a_first_order_gradient_that_overflows_names_the_round_that_meets_it() -> None:
    """What comes from round 1 meets the weights of round 0."""
    with pytest.raises(
        DivergenceError, match=r"round 0: the gradient .* is not finite; lower .* or learn with float64\.$"
    ):
        learn(Overflowing("outer gradient"), 3, learning=Learning(iterations=1))


def test_of_several_rounds_the_last_is_where_it_began() -> None:
    """Where products are waited for only in the end, as on a GPU."""
    fine, bad = [1.0, 2.0], [1.0, math.nan]
    _check_finite(torch.tensor([fine, fine]), [0, 1], 0.1, remedy="hope")
    with pytest.raises(DivergenceError, match="round 2:"):
        _check_finite(torch.tensor([bad, fine, bad, fine]), range(4), 0.1, remedy="hope")


@pytest.mark.parametrize(
    ("overflows", "message"),
    [
        ("loss", "round 0: the outer loss is not finite; lower the clients' learning rate"),
        ("adjoint", "round 1: the gradient of the weights is not finite; lower .* or take the first_order adjoint"),
    ],
)
def test_overflow_is_an_error_with_its_remedy(overflows: str, message: str) -> None:
    with pytest.raises(DivergenceError, match=message) as caught:
        learn(Overflowing(overflows), 3, learning=Learning(iterations=1, adjoint="exact"))
    assert "\n" not in str(caught.value)
    assert learn(Overflowing("nothing"), 3, learning=Learning(iterations=1, adjoint="exact")).losses.isfinite().all()


def test_single_precision_stays_close_to_double_over_100_rounds() -> None:
    """Model and gradient; docs/numbers.md has the figures of real federations."""
    env = tiny(rounds=100, participation_probability=0.8)
    models, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        federation = simulated(env, dtype=dtype)
        models.append(run_rounds(federation, size(), 100)[0].model.double())
        start = federation.initial_model("learn-0")
        theta = torch.ones(100, 3, dtype=torch.float64)
        parts = (federation, theta, Algorithm(), OUTER_LOSSES.make("path"))
        gradients += [found.gradient for found in unroll_and_grad(*parts, "exact", runs=["learn-0"], models=[start])]
    for single, double in (models, gradients):
        assert 0 < float((single - double).norm() / double.norm()) < 1e-3
