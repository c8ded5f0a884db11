import math
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules import Rule, q_fedavg, uniform
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny
from tests.support.reports import report


def decision_of(rule: Rule, updates: ClientUpdates) -> RoundDecision:
    decided, _ = rule(updates, None)
    assert isinstance(decided, RoundDecision)
    return decided


def of(losses: list[float], norms: list[float], **more: Any) -> ClientUpdates:
    return report([10] * len(losses), start_loss=losses, norm=norms, **more)


def test_worked_case() -> None:
    # F = 1, 4, q = 2, η = 0.5: Θ = 1/17, 16/17; s = 17 / (2·1·4/0.5 + 1 + 2·4·9/0.5 + 16) = 17/177.
    found = decision_of(q_fedavg(q=2, lr=0.5), of([1.0, 4.0], [2.0, 3.0]))
    assert found.weights.tolist() == pytest.approx([1 / 17, 16 / 17])
    assert found.step == pytest.approx(17 / 177)


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 2.5])
def test_the_papers_update(q: float) -> None:
    """w − Σ Δ_k / Σ h_k as it stands in the paper, with L = 1/η."""
    drawn, eta = np.random.default_rng(0), 0.2
    w, models = drawn.normal(size=4), drawn.normal(size=(3, 4))
    losses = [0.7, 2.0, 1.1]
    grads = [(w - own) / eta for own in models]
    deltas = [loss**q * g for loss, g in zip(losses, grads, strict=True)]
    hs = [q * loss ** (q - 1) * (g @ g) + loss**q / eta for loss, g in zip(losses, grads, strict=True)]
    expected = w - sum(deltas) / sum(hs)
    norms = [float(np.linalg.norm(own - w)) for own in models]
    found = decision_of(q_fedavg(q=q, lr=eta), of(losses, norms))
    moved = w + found.step * found.weights.numpy() @ (models - w)
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


def test_at_zero_it_is_fedavg_over_the_participants_with_its_step() -> None:
    found = decision_of(q_fedavg(q=0), of([1.0, 4.0, math.nan], [2.0, 3.0, math.nan], participated=[True, True, False]))
    assert (found.weights.tolist(), found.step) == ([0.5, 0.5, 0.0], 1.0)
    env, algorithm = tiny(participation_probability=0.6, seed=3), Algorithm(absent="drop")
    ours, theirs = (run_rounds(simulated(env), rule, 3, algorithm=algorithm)[0] for rule in (q_fedavg(q=0), uniform()))
    torch.testing.assert_close(ours.model, theirs.model)


def test_a_large_q_and_losses_of_zero_stay_finite() -> None:
    found = decision_of(q_fedavg(q=500, lr=0.1), of([3.0, 9.0], [1.0, 1.0]))
    assert found.weights.tolist() == pytest.approx([0, 1], abs=1e-12)
    assert found.step == pytest.approx(1 / (500 / (0.1 * 9) + 1))
    found = decision_of(q_fedavg(q=0.5, lr=0.1), of([0.0, 1.0], [1.0, 1.0]))
    assert found.weights.tolist() == pytest.approx([1e-5 / (1 + 1e-5), 1 / (1 + 1e-5)])
    assert 0 < found.step < 1e-4, "a loss of 0 has a curvature that few steps survive"
    assert decision_of(q_fedavg(lr=0.1), of([0.0, 0.0], [0.0, 0.0])).weights.tolist() == [0.5, 0.5]


def test_the_learning_rate_is_the_federations_unless_given() -> None:
    told = of([1.0, 4.0], [2.0, 3.0], lr=0.5)
    assert decision_of(q_fedavg(q=2), told).step == pytest.approx(17 / 177)
    assert decision_of(q_fedavg(q=2, lr=1.0), told).step == pytest.approx(17 / (8 + 1 + 72 + 16))


def test_an_unknown_learning_rate_is_refused() -> None:
    with pytest.raises(InputError, match=r"round 0: rule 'q-fedavg' needs the clients' learning rate.*q_fedavg\(lr="):
        decision_of(q_fedavg(), of([1.0, 4.0], [2.0, 3.0]))


def test_nobody_participates() -> None:
    empty = report([30, 10], participated=[False] * 2, start_loss=[math.nan] * 2, norm=[math.nan] * 2)
    found = decision_of(q_fedavg(), empty)
    assert (found.weights.tolist(), found.step) == ([0.75, 0.25], 1.0)


def test_negative_losses_are_refused() -> None:
    with pytest.raises(InputError, match="takes powers of losses >= 0, of which -2 is none"):
        decision_of(q_fedavg(lr=0.1), of([1.0, -2.0], [1.0, 1.0]))


def test_a_run_presses_on_the_client_that_fares_worst() -> None:
    (result,) = run_rounds(simulated(tiny()), q_fedavg(q=3), 3)
    assert (result.weights.sum(1) - 1).abs().max() < 1e-12
    assert (result.weights.max(1).values > 0.35).all()


def test_metrics_and_names() -> None:
    assert q_fedavg().required_metrics == {"start_loss", "norm"}
    assert [q_fedavg().name, q_fedavg(2).name, q_fedavg(2, 0.1).name] == [
        "q-fedavg",
        "q-fedavg(q=2)",
        "q-fedavg(q=2, lr=0.1)",
    ]


@pytest.mark.parametrize("settings", [{"q": -1}, {"q": math.nan}, {"lr": 0.0}, {"lr": math.inf}])
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="q-fedavg needs a finite"):
        q_fedavg(**settings)
