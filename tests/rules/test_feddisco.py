"""FedDisco by hand, and against its formula written out in NumPy over the rounds of a run."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules import feddisco, size
from fedunfold.rules.rule import uses_of
from fedunfold.tasks import regression
from fedunfold.training.loop import run_rounds
from tests.support.federations import simulated, tiny
from tests.support.reports import report, weigh

SKEWED = [[15, 15], [30, 10], [30, 0]]  # distances of (1/2, 1/2), (3/4, 1/4) and (1, 0) to the uniform one


def weights_of(rule: Any, updates: ClientUpdates) -> list[float]:
    found: list[float] = weigh(rule, updates)[0].tolist()
    return found


def test_it_says_what_it_reads() -> None:
    assert uses_of(feddisco()) == {"label counts"}


def test_worked_case_by_divergence() -> None:
    # KL: 0, 0.75 ln 1.5 + 0.25 ln 0.5 = 0.130812, ln 2 = 0.693147, divided by their sum: 0, 0.158760, 0.841240.
    # p = 0.3, 0.4, 0.3, so that p − 0.2 d + 0.1 = 0.4, 0.468248, 0.231752, whose sum is 1.1.
    weights = weights_of(feddisco(a=0.2), report([30, 40, 30], label_counts=SKEWED))
    assert weights == pytest.approx([0.4 / 1.1, 0.468248 / 1.1, 0.231752 / 1.1], abs=1e-6)


def test_worked_case_by_distance() -> None:
    # ‖(1/4, −1/4)‖ = 0.353553 and ‖(1/2, −1/2)‖ = 0.707107; p − 0.5 d + 0.1 = 0.4, 0.323223, 0.046447.
    weights = weights_of(feddisco(distance="l2"), report([30, 40, 30], label_counts=SKEWED))
    assert weights == pytest.approx([0.519683, 0.419932, 0.060344], rel=1e-3)
    total = 0.4 + 0.323223 + 0.046447
    assert weights == pytest.approx([0.4 / total, 0.323223 / total, 0.046447 / total], abs=1e-6)


def test_scores_below_zero_count_as_zero() -> None:
    # d = 0, 1 and p = 1/2, 1/2: 0.5 + 0.1 against 0.5 − 1 + 0.1.
    assert weights_of(feddisco(a=1), report([10, 10], label_counts=[[5, 5], [10, 0]])) == [1.0, 0.0]


def test_where_no_score_is_positive_size_decides() -> None:
    rule = feddisco(a=9, b=0)
    assert weights_of(rule, report([30, 10], label_counts=[[30, 0], [10, 0]])) == [0.75, 0.25]


def test_without_discrepancy_it_is_size() -> None:
    assert weights_of(feddisco(a=0, b=0), report([30, 10], label_counts=[[30, 0], [5, 5]])) == [0.75, 0.25]


@pytest.mark.parametrize("distance", ["kl", "l2"])
def test_balanced_labels_give_sizes_up_to_b(distance: Any) -> None:
    counts = [[10, 10, 10], [70, 70, 70]]  # 1/3 is no number of binary digits: rounding must not become a discrepancy
    for b, expected in ((0.0, [1 / 8, 7 / 8]), (0.1, [(1 / 8 + 0.1) / 1.2, (7 / 8 + 0.1) / 1.2])):
        assert weights_of(feddisco(b=b, distance=distance), report([30, 210], label_counts=counts)) == pytest.approx(
            expected
        )


def test_shares_and_discrepancies_are_those_of_the_clients_that_enter() -> None:
    """As if the third client did not exist."""
    with_absent = report([30, 10, 60], participated=[True, True, False], label_counts=[[15, 15], [10, 0], [60, 0]])
    without = report([30, 10], label_counts=[[15, 15], [10, 0]])
    assert weights_of(feddisco(a=0.2), with_absent) == [*weights_of(feddisco(a=0.2), without), 0.0]


def test_nobody_participates() -> None:
    empty = report([30, 10], participated=[False, False], label_counts=[[15, 15], [10, 0]])
    assert weights_of(feddisco(), empty) == [0.75, 0.25]


# --- over a run --------------------------------------------------------------------------------------------


def written_out(env: Environment, here: np.ndarray, a: float, b: float, distance: str) -> np.ndarray:
    """Θ of the clients that take part, from the labels themselves."""
    data = env.load()
    labels = [data.y[data.offsets[k] : data.offsets[k + 1]].numpy() for k in range(len(data.keys))]
    classes = data.task.num_groups
    present = np.flatnonzero(here)
    total = sum(len(labels[k]) for k in present)
    gaps = []
    for k in present:
        shares = np.array([np.mean(labels[k] == y) for y in range(classes)])
        if distance == "l2":
            gaps.append(math.sqrt(sum((share - 1 / classes) ** 2 for share in shares)))
        else:
            gaps.append(sum(share * math.log(share * classes) for share in shares if share > 0))
    if distance == "kl":
        gaps = [gap / sum(gaps) for gap in gaps]
    scores = [max(0.0, len(labels[k]) / total - a * gap + b) for k, gap in zip(present, gaps, strict=True)]
    theta = np.zeros(len(labels))
    theta[present] = np.array(scores) / sum(scores)
    return theta


@pytest.mark.parametrize(("a", "b", "distance"), [(0.5, 0.1, "kl"), (0.3, 0.2, "l2"), (0.9, 0.05, "kl")])
def test_against_the_formula_over_the_rounds_of_a_run(a: float, b: float, distance: Any) -> None:
    env = tiny({"a": 7, "b": 4, "c": 9, "d": 5, "e": 8}, clients_per_round=4, participation_probability=0.8, rounds=6)
    (result,) = run_rounds(simulated(env), feddisco(a, b, distance=distance), 6, algorithm=Algorithm(absent="drop"))
    compared = [t for t in range(6) if result.participated[t].any()]
    assert len(compared) > 3 and len({tuple(result.participated[t].tolist()) for t in compared}) > 2
    for t in compared:
        expected = written_out(env, result.participated[t].numpy(), a, b, distance)
        assert result.weights[t].tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    assert not torch.allclose(result.weights, run_rounds(simulated(env), size(), 6)[0].weights)


# --- what it needs -----------------------------------------------------------------------------------------


def test_unknown_label_counts_are_refused() -> None:
    for counts in (None, torch.zeros(2, 0), [[30], [10]]):
        with pytest.raises(InputError, match="round 0: rule 'feddisco' needs the label counts of every client"):
            weigh(feddisco(), report([30, 10], label_counts=counts))


def test_a_task_without_classes_is_refused() -> None:
    stream = np.random.default_rng(0)
    clients = {key: (stream.normal(size=(6, 3)), stream.normal(size=6)) for key in "ab"}
    env = Environment.from_arrays(clients, clients["a"], task=regression(), rounds=1, batch_size=3, lr=0.1)
    with pytest.raises(InputError, match="rule 'feddisco' needs the label counts"):
        run_rounds(simulated(env), feddisco(), 1)


def test_names_say_the_settings() -> None:
    assert feddisco().name == "feddisco"
    assert feddisco(a=0.1, distance="l2").name == "feddisco(a=0.1, b=0.1, distance=l2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"a": -1}, "finite a >= 0"), ({"b": math.inf}, "finite b"), ({"distance": "cosine"}, "'kl' and 'l2'")],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        feddisco(**settings)
