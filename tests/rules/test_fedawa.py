import math

import pytest
import torch
from torch import Tensor

from fedunfold.aggregation.absent import RememberedUpdates
from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.rules import fedawa, size
from fedunfold.rules.fedawa import geometry, loss_gradient
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny
from tests.support.reports import report, weigh

AGREEING = [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]


def literal(logits: Tensor, model: Tensor, updates: Tensor) -> Tensor:
    """The loss as the paper has it."""
    p = logits.softmax(0)
    cosines = torch.nn.functional.cosine_similarity(model[None], model + updates, dim=1)
    loss: Tensor = p @ (1 - cosines) + p @ (updates - p @ updates).norm(dim=1)
    return loss


def drawn(n: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits, model, updates = (torch.randn(s, dtype=torch.float64, generator=random) for s in ((n,), (d,), (n, d)))
    return logits, model, 0.3 * updates


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_autograds(n: int, seed: int) -> None:
    logits, model, updates = drawn(n, 12, seed)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(literal(leaf, model, updates), leaf)
    found = loss_gradient(logits, *geometry(updates, model))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_the_cosine_keeps_its_digits_in_single_precision() -> None:
    _, model, updates = drawn(3, 1000, 0)
    turns, _ = geometry((1e-3 * updates).float(), model.float())
    expected = 1 - torch.nn.functional.cosine_similarity(model[None], model + 1e-3 * updates, dim=1)
    torch.testing.assert_close(turns, expected, rtol=1e-3, atol=0)


def test_over_rounds_it_is_adam_on_the_loss() -> None:
    """Everybody participates: PyTorch's own Adam, on the loss as it is written."""
    sizes, rule, state = [30, 10, 20], fedawa(lr=0.2), None
    logits = torch.tensor(sizes, dtype=torch.float64).log().requires_grad_()
    adam = torch.optim.Adam([logits], lr=0.2)
    for t in range(5):
        _, model, updates = drawn(3, 6, t)
        adam.zero_grad()
        literal(logits, model, updates).backward()  # type: ignore[no-untyped-call]
        adam.step()
        weights, state = weigh(rule, report(sizes, round=t, updates=updates, model=model), state)
        torch.testing.assert_close(weights, logits.detach().softmax(0), rtol=1e-9, atol=1e-12)


def test_the_first_step_by_hand() -> None:
    """Adam's first step is ± lr: up for the two that agree, down for the odd one."""
    weights, state = weigh(fedawa(lr=0.5), report([10, 10, 15], updates=AGREEING, model=[5.0, 0.0]))
    up, down = 10 * math.exp(0.5), 15 * math.exp(-0.5)
    assert weights.tolist() == pytest.approx([up / (2 * up + down)] * 2 + [down / (2 * up + down)], rel=1e-6)
    assert state["c"][0] == pytest.approx(math.log(15) - 0.5)


def test_without_a_learning_rate_it_is_size() -> None:
    state = None
    for t in range(3):
        weights, state = weigh(fedawa(lr=0), report([30, 10, 60], round=t, updates=AGREEING, model=[1.0, 1.0]), state)
        assert weights.tolist() == pytest.approx([0.3, 0.1, 0.6])
    ours, theirs = (run_rounds(simulated(tiny()), rule, 3)[0] for rule in (fedawa(lr=0), size()))
    torch.testing.assert_close(ours.model, theirs.model)


def test_a_client_that_does_not_enter_keeps_what_it_had() -> None:
    rule = fedawa(lr=0.5)
    _, state = weigh(rule, report([10, 10, 10], updates=AGREEING, model=[1.0, 0.0]))
    absent = report([10, 10, 10], round=1, participated=[True, False, True], updates=AGREEING[1:], model=[1.0, 0.0])
    weights, after = weigh(rule, absent, state)
    assert after["b"] == state["b"] and after["a"] != state["a"]
    assert weights[1] == 0 and float(weights.sum()) == pytest.approx(1)
    assert [after[name][3] for name in "abc"] == [2, 1, 2]
    weights, unchanged = weigh(rule, report([30, 10], participated=[False, False], model=[1.0, 0.0]), state)
    assert weights.tolist() == [0.75, 0.25] and unchanged == state


def test_remembered_updates_enter() -> None:
    late = report([10, 10], participated=[True, False], updates=[[1.0, 0.0]], model=[1.0, 0.0])
    memory = {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([-1.0, 0.0])}
    remembering = type(late)(**vars(late) | {"remembered": RememberedUpdates(memory, torch.zeros(0, 2))})
    assert (
        weigh(fedawa(), remembering)[0].tolist()
        == weigh(fedawa(), report([10, 10], updates=[[1.0, 0.0], [-1.0, 0.0]], model=[1.0, 0.0]))[0].tolist()
    )


@pytest.mark.parametrize("updates", [[[1.0, 2.0]] * 3, [[0.0, 0.0]] * 3, [[-3.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
@pytest.mark.parametrize("model", [[3.0, -1.0], [0.0, 0.0]])
def test_equal_updates_and_models_of_zeros_have_a_finite_gradient(
    updates: list[list[float]], model: list[float]
) -> None:
    weights, _ = weigh(fedawa(lr=0.1), report([1, 1, 1], updates=updates, model=model))
    assert weights.isfinite().all()
    if updates[0] == updates[1]:
        assert weights.tolist() == pytest.approx([1 / 3] * 3)


def test_running_statistics_have_no_say() -> None:
    layout = ParamLayout(("w",), (torch.Size([2]),), ("running_mean",), (torch.Size([1]),))
    plain = report([10, 10, 10], updates=AGREEING, model=[1.0, 0.0])
    longer = torch.cat([torch.tensor(AGREEING), torch.tensor([[100.0], [-100.0], [7.0]])], 1)
    wide = report([10, 10, 10], updates=longer, model=[1.0, 0.0, 50.0])
    wide = type(wide)(**vars(wide) | {"layout": layout})
    assert weigh(fedawa(), wide)[0].tolist() == weigh(fedawa(), plain)[0].tolist()


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"round 0: rule 'fedawa' compares models with w\^\(t\)"):
        weigh(fedawa(), report([1, 1], updates=[[1.0, 0.0], [0.0, 1.0]]))


def test_names() -> None:
    assert fedawa().required_metrics == frozenset()
    assert [fedawa().name, fedawa(0.5).name] == ["fedawa", "fedawa(lr=0.5)"]


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_bad_settings_are_refused(lr: float) -> None:
    with pytest.raises(InputError, match="fedawa needs a finite lr"):
        fedawa(lr)
