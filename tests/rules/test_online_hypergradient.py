"""The hypergradient by hand, and on quadratics, where it is exact."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.parts import RoundDecision
from fedunfold.rules import online_hypergradient, size
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny
from tests.support.reports import report

ETA = 0.2


def of(
    t: int, updates: Sequence[Sequence[float]] | Tensor, sizes: Sequence[int] = (30, 10), **more: Any
) -> ClientUpdates:
    steps = more.pop("num_steps", [1] * len(sizes))
    return report(sizes, round=t, updates=torch.as_tensor(updates).double(), num_steps=steps, lr=ETA, **more)


def decided(rule: Any, updates: ClientUpdates, state: Any = None) -> tuple[RoundDecision, Any]:
    found, state = rule(updates, state)
    assert isinstance(found, RoundDecision)
    return found, state


def test_the_first_round_is_fedavg() -> None:
    found, state = decided(online_hypergradient(), of(0, [[1.0, 0.0], [0.0, 1.0]]))
    assert found.weights.tolist() == pytest.approx([0.75, 0.25])
    assert found.step == 1.0
    assert state["logits"] == pytest.approx({"a": math.log(30), "b": math.log(10)})


def test_two_rounds_by_hand() -> None:
    rule = online_hypergradient(step_size=0.1)
    _, state = decided(rule, of(0, [[1.0, 0.0], [0.0, 1.0]]))
    # ∇f = −(0.75 (2, 1)/(0.2·2) + 0.25 (0, −4)/(0.2·1)) = (−3.75, 3.125), which is h; Θ = (0.75, 0.25), Θh = −2.03125.
    found, state = decided(rule, of(1, [[2.0, 1.0], [0.0, -4.0]], num_steps=[2, 1]), state)
    a, b = math.log(30) + 0.1 * 0.75 * (3.75 - 2.03125), math.log(10) - 0.1 * 0.25 * (3.125 + 2.03125)
    assert state["logits"] == pytest.approx({"a": a, "b": b})
    assert found.weights.tolist() == pytest.approx([1 / (1 + math.exp(b - a)), 1 / (1 + math.exp(a - b))])
    assert found.step == pytest.approx(math.exp(0.1 * 2.03125))


# --- quadratics --------------------------------------------------------------------------------------------

CENTRES = torch.tensor([[3.0, 1.0], [-1.0, 2.0]], dtype=torch.float64)
SHARES = torch.tensor([0.75, 0.25], dtype=torch.float64)


def loss(w: Tensor) -> Tensor:
    """f(w) = Σ_k p_k ‖w − c_k‖²/2."""
    return SHARES @ (w - CENTRES).square().sum(1) / 2


def stepped(w: Tensor) -> Tensor:
    """Δ_k of one step of gradient descent."""
    return -ETA * (w - CENTRES)


def test_one_full_step_a_client_makes_it_the_gradient_of_the_next_models_loss() -> None:
    """∇f is then exact, so that λ and log γ follow autograd through w^(t+1) = w + γ Σ softmax(λ)_k Δ_k."""
    rule, state, w = online_hypergradient(step_size=0.3), None, torch.tensor([5.0, -4.0], dtype=torch.float64)
    logits, log_scale = torch.tensor([30.0, 10.0], dtype=torch.float64).log(), torch.zeros((), dtype=torch.float64)
    for t in range(4):
        found, state = decided(rule, of(t, stepped(w)), state)
        torch.testing.assert_close(found.weights, logits.softmax(0))
        assert found.step == pytest.approx(float(log_scale.exp()))
        leaves = logits.clone().requires_grad_(), log_scale.clone().requires_grad_()
        moved = w + leaves[1].exp() * leaves[0].softmax(0) @ stepped(w)
        to_logits, to_scale = torch.autograd.grad(loss(moved), leaves)
        logits, log_scale, w = logits - 0.3 * to_logits, log_scale - 0.3 * to_scale, moved.detach()


def test_its_sign_on_a_two_client_quadratic() -> None:
    """At w = 0 the optimum 2 lies where ann pulls; at 4, beyond both, where bob pulls hardest; and steps are short."""
    for start, gains in ((0.0, 0), (4.0, 1)):
        centres, rule, state = torch.tensor([[3.0], [-1.0]]).double(), online_hypergradient(0.5), None
        w = torch.tensor([start], dtype=torch.float64)
        for t in range(2):
            found, state = decided(rule, of(t, -ETA * (w - centres)), state)
            if t == 0:
                w = w + found.step * found.weights @ (-ETA * (w - centres))
        assert found.weights[gains] > SHARES[gains] + 0.01
        assert found.step > 1, "the optimum is still ahead"


# --- who comes and goes ------------------------------------------------------------------------------------


def test_absent_clients_keep_their_part_and_have_no_weight() -> None:
    rule = online_hypergradient(step_size=0.1)
    _, state = decided(rule, of(0, [[1.0, 0.0], [0.0, 1.0]]))
    found, after = decided(rule, of(1, [[2.0, 1.0]], participated=[True, False], num_steps=[1, 0]), state)
    # ∇f = −(2, 1)/0.2 from ann alone: both of the first round are judged by it.
    assert after["logits"]["a"] == pytest.approx(math.log(30) + 0.1 * 0.75 * (10 - 8.75))
    assert after["logits"]["b"] == pytest.approx(math.log(10) + 0.1 * 0.25 * (5 - 8.75))
    assert found.weights.tolist() == [1.0, 0.0]
    _, last = decided(rule, of(2, [[2.0, 1.0], [1.0, 1.0]]), after)
    assert last["logits"]["b"] == after["logits"]["b"], "bob's update was not in the round before"


def test_a_round_of_nobody_teaches_nothing_and_forgets_nothing() -> None:
    rule = online_hypergradient(step_size=0.1)
    _, state = decided(rule, of(0, [[1.0, 0.0], [0.0, 1.0]]))
    nobody = of(1, torch.zeros(0, 2), participated=[False, False], num_steps=[0, 0])
    found, after = decided(rule, nobody, state)
    assert found.weights.tolist() == [0.75, 0.25]
    third = of(2, [[2.0, 1.0], [0.0, -4.0]])
    assert decided(rule, third, after)[0].weights.tolist() == decided(rule, third, state)[0].weights.tolist()


def test_the_scale_stays_between_a_tenth_and_ten() -> None:
    for second, limit in (([[9.0, 9.0]] * 2, 10.0), ([[-9.0, -9.0]] * 2, 0.1)):
        rule, (_, state) = (
            online_hypergradient(100.0),
            decided(online_hypergradient(100.0), of(0, [[1.0, 1.0], [1.0, 1.0]])),
        )
        assert decided(rule, of(1, second), state)[0].step == pytest.approx(limit)


def test_without_a_step_it_is_fedavg() -> None:
    env = tiny(participation_probability=0.6, seed=3)
    ours, theirs = (run_rounds(simulated(env), rule, 3)[0] for rule in (online_hypergradient(0.0), size()))
    assert not ours.participated.all() and ours.participated.any(1).all()
    torch.testing.assert_close(ours.weights.sum(1), torch.ones(3, dtype=torch.float64))
    weights = torch.where(ours.participated, theirs.weights, 0.0)
    torch.testing.assert_close(ours.weights, weights / weights.sum(1, keepdim=True))


def test_the_state_given_is_left_alone() -> None:
    rule = online_hypergradient()
    _, state = decided(rule, of(0, [[1.0, 0.0], [0.0, 1.0]]))
    before = dict(state["logits"])
    decided(rule, of(1, [[2.0, 1.0], [0.0, -4.0]]), state)
    assert state["logits"] == before and state["log_scale"] == 0.0


# --- what it needs -----------------------------------------------------------------------------------------


def test_unknown_learning_rates_and_steps_are_refused_in_the_first_round() -> None:
    silent = of(0, [[1.0, 0.0], [0.0, 1.0]])
    silent = type(silent)(**vars(silent) | {"lr": None})
    with pytest.raises(InputError, match=r"round 0: rule 'online-hypergradient' needs the clients' learning rate"):
        decided(online_hypergradient(), silent)
    assert decided(online_hypergradient(lr=0.1), silent)[0].step == 1.0
    with pytest.raises(InputError, match="needs the number of local steps of every client, and 'b' does not report it"):
        decided(online_hypergradient(), of(0, [[1.0, 0.0], [0.0, 1.0]], num_steps=[3, 0]))


def test_names() -> None:
    rules = (online_hypergradient(), online_hypergradient(2), online_hypergradient(2, 0.1))
    assert [rule.name.removeprefix("online-hypergradient") for rule in rules] == [
        "",
        "(step_size=2)",
        "(step_size=2, lr=0.1)",
    ]


@pytest.mark.parametrize("settings", [{"step_size": -1}, {"step_size": math.inf}, {"lr": 0.0}, {"lr": math.nan}])
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="online-hypergradient needs a finite"):
        online_hypergradient(**settings)
