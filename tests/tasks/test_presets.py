"""Losses and metrics of every preset against scikit-learn, lifelines or a case worked by hand, and what they refuse."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from pandas import DataFrame
from sklearn import metrics as reference
from torch import Tensor
from torch.nn import functional

from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, Task
from fedunfold.tasks import binary, classification, multilabel, next_token, regression, segmentation, survival, task


def drawn(name: str, n: int, seed: int = 0) -> tuple[Task, Tensor, Tensor]:
    """Outputs and targets of n rows."""
    stream = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(stream.normal(size=(n, *shape)))

    def whole(high: int, *shape: int) -> Tensor:
        return torch.from_numpy(stream.integers(0, high, (n, *shape)))

    match name:
        case "classification":
            return classification(4), normal(4), whole(4)
        case "binary":
            return binary(), normal(2), whole(2)
        case "multilabel":
            return multilabel(3), normal(3), whole(2, 3).double()
        case "regression":
            return regression(outputs=2), normal(2), normal(2)
        case "segmentation":
            return segmentation(3), normal(3, 4, 5), whole(3, 4, 5)
        case "next_token":
            return next_token(5), normal(6, 5), whole(5, 6)
        case _:
            times = torch.from_numpy(stream.integers(1, 8, n)).double()
            return survival(), normal(1), torch.stack([times, whole(2).double()], 1)


def metrics_of(chosen: Task, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return chosen.metrics(chosen.statistics(outputs, targets))


# --- against scikit-learn and lifelines ----------------------------------------------------------------------


def test_classification() -> None:
    chosen, z, y = drawn("classification", 200)
    found, predicted = metrics_of(chosen, z, y), z.argmax(1)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, predicted))
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(y, predicted))
    by_class = chosen.group_scores(chosen.statistics(z, y))
    assert by_class.tolist() == pytest.approx(reference.recall_score(y, predicted, average=None).tolist())
    assert float(chosen.losses(z, y).mean()) == pytest.approx(reference.log_loss(y, z.softmax(1)))


def test_binary() -> None:
    chosen, z, y = drawn("binary", 500)
    found, scores, predicted = metrics_of(chosen, z, y), z.softmax(1)[:, 1], z.argmax(1)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, predicted))
    assert found["balanced_accuracy"] == pytest.approx(reference.balanced_accuracy_score(y, predicted))
    assert found["auc"] == pytest.approx(reference.roc_auc_score(y, scores), abs=1e-3)  # in 1,000 bins
    assert found["auc"] == pytest.approx(reference.roc_auc_score(y, (scores * 1000).floor()), rel=1e-12)
    assert found["f1"] == pytest.approx(reference.f1_score(y, predicted))
    assert found["brier"] == pytest.approx(reference.brier_score_loss(y, scores))


def test_multilabel() -> None:
    chosen, z, y = drawn("multilabel", 100)
    found, predicted = metrics_of(chosen, z, y), z > 0
    assert found["f1"] == pytest.approx(reference.f1_score(y, predicted, average="macro"))
    assert found["micro_f1"] == pytest.approx(reference.f1_score(y, predicted, average="micro"))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, predicted))
    expected = np.mean([reference.log_loss(y[:, c], z[:, c].sigmoid()) for c in range(3)])
    assert float(chosen.losses(z, y).mean()) == pytest.approx(expected)


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression(outputs: int) -> None:
    _, z, y = drawn("regression", 100)
    z, y = z[:, :outputs], y[:, :outputs]
    found = metrics_of(regression(outputs=outputs), z, y)
    assert found["rmse"] == pytest.approx(math.sqrt(reference.mean_squared_error(y, z)))
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(y, z))
    assert found["r2"] == pytest.approx(reference.r2_score(y, z))
    expected = reference.mean_squared_error(y, z)
    assert float(regression(outputs=outputs).losses(z, y).mean()) == pytest.approx(expected)


def test_huber_by_hand() -> None:
    """Errors of 1 and 3 with delta 2: 1²/2 and 2 (3 − 2/2)."""
    losses = regression("huber", delta=2.0).losses(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
    assert losses.tolist() == [0.5, 4.0]


def test_segmentation() -> None:
    chosen, z, y = drawn("segmentation", 6)
    found, predicted = metrics_of(chosen, z, y), z.argmax(1).flatten()
    assert found["iou"] == pytest.approx(reference.jaccard_score(y.flatten(), predicted, average="macro"))
    assert found["dice"] == pytest.approx(reference.f1_score(y.flatten(), predicted, average="macro"))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y.flatten(), predicted))


def test_the_loss_of_a_segmentation_by_hand() -> None:
    """Two pixels, both logits 0, one of each class: ln 2, and Dice (2·½ + 1) / (1 + 1 + 1) of each class."""
    loss = segmentation(2).losses(torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 1]]]))
    assert loss.tolist() == pytest.approx([math.log(2) + 1 - 2 / 3])


def test_next_token() -> None:
    chosen, z, y = drawn("next_token", 20)
    y[:, 4:] = -100
    found = metrics_of(chosen, z, y)
    kept, logits = y[:, :4].flatten(), z[:, :4].flatten(0, 1)
    assert found["perplexity"] == pytest.approx(math.exp(reference.log_loss(kept, logits.softmax(1))))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(kept, logits.argmax(1)))
    expected = functional.cross_entropy(z.transpose(1, 2), y, ignore_index=-100)
    assert float(chosen.losses(z, y).mean()) == pytest.approx(float(expected))


@pytest.mark.parametrize("seed", range(5))
def test_concordance_against_lifelines(seed: int) -> None:
    """With ties in times and in risks."""
    chosen, z, y = drawn("survival", 60, seed)
    z = (2 * z).round()
    expected = concordance_index(y[:, 0], -z[:, 0], y[:, 1])
    assert metrics_of(chosen, z, y)["concordance"] == pytest.approx(expected, abs=1e-12)


def test_concordance_of_many_rows_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, z, y = drawn("survival", 60)
    expected = metrics_of(chosen, z, y)
    monkeypatch.setattr(sys.modules["fedunfold.tasks.survival"], "PAIRS_AT_ONCE", 100)
    assert metrics_of(chosen, z, y) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of lifelines with a new pandas
def test_coxs_likelihood_against_lifelines() -> None:
    """At the coefficient that lifelines finds, whose likelihood handles ties after Efron."""
    _, x, y = drawn("survival", 80)
    table = DataFrame({"x": x[:, 0], "time": y[:, 0], "event": y[:, 1]})
    fitted = CoxPHFitter().fit(table, "time", "event")
    risks = x * float(fitted.params_["x"])
    assert -float(survival().losses(risks, y).sum()) == pytest.approx(fitted.log_likelihood_, rel=1e-6)
    assert survival("breslow").losses(risks, y).sum() > survival().losses(risks, y).sum()


def test_a_minibatch_without_an_event_has_no_loss() -> None:
    risks = torch.randn(4, 1, requires_grad=True)
    total = survival().losses(risks, torch.tensor([[1.0, 0.0]] * 4)).sum()
    assert total.item() == 0
    assert not torch.autograd.grad(total, risks)[0].any()


# --- for all inputs ------------------------------------------------------------------------------------------

NAMES = ["classification", "binary", "multilabel", "regression", "segmentation", "next_token"]


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(NAMES), n=st.integers(2, 30), cut=st.integers(1, 29), seed=st.integers(0, 9))
def test_statistics_of_parts_add_up(name: str, n: int, cut: int, seed: int) -> None:
    chosen, z, y = drawn(name, n, seed)
    cut = min(cut, n - 1)
    parts = chosen.statistics(z[:cut], y[:cut]) + chosen.statistics(z[cut:], y[cut:])
    torch.testing.assert_close(parts, chosen.statistics(z, y), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from([*NAMES, "survival"]), n=st.integers(1, 20), seed=st.integers(0, 9))
def test_the_order_of_rows_does_not_matter(name: str, n: int, seed: int) -> None:
    chosen, z, y = drawn(name, n, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    torch.testing.assert_close(chosen.statistics(z[order], y[order]), chosen.statistics(z, y), rtol=1e-12, atol=1e-12)
    assert float(chosen.losses(z[order], y[order]).sum()) == pytest.approx(float(chosen.losses(z, y).sum()))


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from([*NAMES, "survival"]), n=st.integers(1, 12), seed=st.integers(0, 9))
def test_slopes_are_those_of_autograd(name: str, n: int, seed: int) -> None:
    """Of two minibatches, the second one short, with any weights."""
    chosen, z, y = drawn(name, 2 * n, seed)
    z, y = z.view(2, n, *z.shape[1:]), y.view(2, n, *y.shape[1:])
    counts, weights = [n, max(1, n - 2)], torch.rand(2, n, dtype=torch.float64)
    weights[1, counts[1] :] = 0
    losses, slopes = chosen.values(z, y, counts)
    leaf = z.clone().requires_grad_()
    expected = [chosen.losses(leaf[i, :count], y[i, :count]) for i, count in enumerate(counts)]
    total = torch.stack([own @ weights[i, : len(own)] for i, own in enumerate(expected)]).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(slopes(weights), gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(losses[0], expected[0].detach(), rtol=1e-10, atol=1e-12)


def test_every_preset_is_made_again_from_its_description() -> None:
    for name in [*NAMES, "survival"]:
        chosen = drawn(name, 2)[0]
        assert TASKS.make(**chosen.describe()) == chosen
    assert set(TASKS.names()) >= {*NAMES, "survival"}


# --- what is refused -----------------------------------------------------------------------------------------

REFUSED: list[tuple[Task, Any, str]] = [
    (classification(3), ["a", "b"], "y has type <U1; give class numbers as integers from 0"),
    (classification(3), [0, 3], r"y has the label 3 but there are 3 classes \(0 to 2\)"),
    (binary(), [0, 2], "y has the label 2 but there are 2 classes"),
    (multilabel(2), [[0, 1], [0, 2]], "y has a label that is neither 0 nor 1 in row 1; code it as 0 or 1"),
    (multilabel(3), [[0, 1]], r"y has shape \(1, 2\); give 0 or 1 for each of the 3 labels"),
    (regression(), ["tall", "small"], "y has type <U5; give numbers"),
    (regression(), [1.0, math.nan], "y has a NaN or infinite value in row 1; drop the row"),
    (regression(outputs=2), [1.0, 2.0], r"y has shape \(2,\); give 2 number\(s\) a row"),
    (segmentation(2), [[[0, 0]], [[0, 0]]], "y has no pixel of another class than 0, the background"),
    (segmentation(2), [[[0, 2]]], "y has the label 2 but there are 2 classes"),
    (segmentation(2), [0, 1], "give a mask of class numbers for every image"),
    (next_token(4), [[0, 4]], "y has the label 4 but there are 4 classes"),
    (next_token(4), [0, 1], "give the next token everywhere"),
    (next_token(4), [[-100, -100]], "y has no token that counts, only -100; give at least one"),
    (survival(), [[1.0, 1.0], [-2.0, 0.0]], "y has the negative time -2 in row 1; give times from 0"),
    (survival(), [[1.0, 2.0]], "y has an event that is neither 0 nor 1 in row 0"),
    (survival(), [1.0, 2.0], r"y has shape \(2,\); give \(time, event\) in every row"),
]


@pytest.mark.parametrize(("chosen", "targets", "message"), REFUSED)
def test_targets_that_are_none(chosen: Task, targets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen.check_targets(np.array(targets), "y")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: classification(1), "a classifier needs 2 or more"),
        (lambda: binary(3), "a binary task has 2 classes, not 3"),
        (lambda: multilabel(0), "at least 1 label, not 0"),
        (lambda: regression("squared"), "mse or huber, not 'squared'"),  # type: ignore[arg-type]
        (lambda: regression(delta=0.0), "delta > 0"),
        (lambda: segmentation(1), "2 classes or more"),
        (lambda: next_token(1), "2 tokens or more"),
        (lambda: survival("exact"), "efron or breslow, not 'exact'"),  # type: ignore[arg-type]
        (lambda: task("mine", lambda z, y: y, {}), "needs at least one metric"),
    ],
)
def test_settings_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_outputs_of_a_wrong_model() -> None:
    with pytest.raises(InputError, match=r"gives \[3, 2\] for 3 rows, where the task survival needs .* \[3, 1\]"):
        survival().check_outputs(torch.zeros(3, 2), torch.zeros(3, 2))
    mine = task("mine", lambda z, y: ((z - y) ** 2).mean(), {"error": lambda z, y: (z - y).abs()[:, 0]})
    with pytest.raises(InputError, match="the loss of the task 'mine' must give a number for every row"):
        mine.check_outputs(torch.zeros(3, 1), torch.zeros(3, 1))
