"""How unlike clients are, against the formulas worked by hand, and what is said about it."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

import fedunfold as fu
from fedunfold.config import Environment, environment
from fedunfold.config.heterogeneity import Heterogeneity
from fedunfold.config.recommendation import recommend
from fedunfold.core.task import Task


def federation(counts: list[list[int]], **settings: Any) -> Environment:
    """Clients with so many samples of each class."""
    labels = [np.repeat(np.arange(len(row)), row) for row in counts]
    clients = {f"c{k}": (np.zeros((len(y), 1)), y) for k, y in enumerate(labels)}
    test = (np.zeros((1, 1)), np.zeros(1, int))
    chosen = {"rounds": 3, "batch_size": 4, "lr": 0.1} | settings
    return Environment.from_arrays(clients, test, classes=len(counts[0]), **chosen)


def measured(env: Environment) -> Heterogeneity:
    return Heterogeneity.of(env, env.load())


def test_worked_by_hand() -> None:
    """p = (1/2, 1/4, 1/4); client 0 has (1, 0, 0), client 1 (1/4, 3/8, 3/8)."""
    found = measured(
        federation(
            [[4, 0, 0], [2, 3, 3]],
            epochs={"c0": (1, 2, 3), "c1": 5},
            participation_probability={"c0": 0.5, "c1": 0.8},
        )
    )
    assert found.divergence == pytest.approx({"c0": 0.5, "c1": 0.25})
    assert found.mean_divergence == pytest.approx(4 / 12 * 0.5 + 8 / 12 * 0.25)
    assert found.size_ratio == 2
    assert found.epochs_ratio == 2.5
    assert found.participation_spread == pytest.approx(0.3)
    assert found.expected_present == pytest.approx(1.3)
    assert found.nobody == pytest.approx(0.5 * 0.2)
    assert found.sole_holders == {"1": "c1", "2": "c1"}


def test_divergence_by_chance_worked_by_hand() -> None:
    """p = (1/2, 1/4, 1/4): ½ (1/2 + 2 √3/4) √(2 v_k/π) with v = 1/4 − 1/12 and 1/8 − 1/12."""
    found = measured(federation([[4, 0, 0], [2, 3, 3]]))
    spread = 0.5 * (0.5 + 2 * 3**0.5 / 4)
    assert found.by_chance == pytest.approx(
        {"c0": spread * (2 / math.pi / 6) ** 0.5, "c1": spread * (2 / math.pi / 24) ** 0.5}
    )


def test_fair_samples_diverge_as_much_as_by_chance() -> None:
    """Rows dealt at random, 200 times: labels, and numbers."""
    stream = np.random.default_rng(0)
    labels, values = np.repeat([0, 1, 2], [120, 60, 20]), stream.normal(size=200)
    seen: dict[str, list[float]] = {"labels": [], "targets": []}
    for _ in range(200):
        stream.shuffle(labels)
        stream.shuffle(values)
        counts = [np.bincount(part, minlength=3).tolist() for part in (labels[:60], labels[60:])]
        by_labels, by_values = measured(federation(counts)), measured(numbers(list(values[:60]), list(values[60:])))
        for found in (by_labels, by_values):
            seen[found.subject].append(found.divergence["c0"])
    assert np.mean(seen["labels"]) == pytest.approx(by_labels.by_chance["c0"], rel=0.15)
    assert np.mean(seen["targets"]) == pytest.approx(by_values.by_chance["c0"], rel=0.15)


def numbers(*targets: list[Any], task: Task | None = None) -> Environment:
    """Clients with these targets."""
    clients = {f"c{k}": (np.zeros((len(y), 1)), np.array(y)) for k, y in enumerate(targets)}
    test = np.zeros((1, 1)), np.array(targets[0][:1])
    return Environment.from_arrays(clients, test, task=task or fu.regression(), rounds=3, batch_size=4, lr=0.1)


def test_numbers_by_means_spread_and_distance_of_their_distributions() -> None:
    """ȳ = 4; means 2 and 8; Σ N_k (ȳ_k − ȳ)² = 4·4 + 2·16 = 48 of Σ (y − ȳ)² = 48 + 20 + 2."""
    first, second = [-1.0, 1.0, 3.0, 5.0], [7.0, 9.0]
    found = measured(numbers(first, second))
    assert found.targets == {
        "c0": pytest.approx({"mean": 2.0, "sd": (20 / 3) ** 0.5}),
        "c1": pytest.approx({"mean": 8.0, "sd": 2**0.5}),
    }
    assert found.between == pytest.approx(48 / 70)
    distances = {key: ks_2samp(own, first + second).statistic for key, own in (("c0", first), ("c1", second))}
    assert found.divergence == pytest.approx(distances)
    assert (found.subject, found.sole_holders) == ("targets", {})
    assert "targets differ: clients diverge" in recommend(found).reasons[0]


def test_survival_by_event_rates_and_times() -> None:
    found = measured(
        numbers([[1.0, 1.0], [3.0, 1.0], [5.0, 0.0]], [[2.0, 0.0], [4.0, 0.0], [6.0, 0.0]], task=fu.survival())
    )
    assert found.targets["c0"] == pytest.approx({"event_rate": 2 / 3, "median_time": 3.0})
    assert found.targets["c1"] == pytest.approx({"event_rate": 0.0, "median_time": 4.0})
    assert found.divergence == pytest.approx({"c0": 1 / 3, "c1": 1 / 3})
    assert found.between is None


def test_tokens_by_how_often_each_occurs() -> None:
    found = measured(numbers([[0, 0], [0, 1]], [[1, 1], [1, 0]], task=fu.next_token(2)))
    assert found.divergence == pytest.approx({"c0": 0.25, "c1": 0.25})
    assert found.targets == {}


def test_alike_numbers_are_alike() -> None:
    alike = [1.0, 2.0, 3.0]
    found = measured(numbers(alike, alike))
    assert found.mean_divergence == found.between == 0
    assert recommend(found).reasons == (
        "clients are alike in targets, sizes, epochs and participation: weights by size are hard to beat.",
    )


def test_variance_between_clients_counts_where_distributions_overlap() -> None:
    """Means 3 and 4.5 about ȳ = 3.75: Σ N_k (ȳ_k − ȳ)² = 20 · 0.75² = 11.25, and 2 · 20 within clients."""
    first = 2 * [1.0, 2.0, 3.0, 4.0, 5.0]
    found = measured(numbers(first, [y + 1.5 for y in first]))
    assert found.between == pytest.approx(11.25 / 51.25)
    assert found.between_by_chance == pytest.approx(1 / 19)
    assert found.mean_divergence == pytest.approx(0.2)
    assert recommend(found).learned_weights == "perhaps"
    assert recommend(found).reasons == (
        "targets differ: 22 % of their variance lies between clients, where fair samples would have 5 %.",
    )


def test_variance_that_small_clients_have_by_chance_does_not_count() -> None:
    """1 of 5 lies between clients, where 1 of 3 would on average."""
    found = measured(numbers([0.0, 2.0], [1.0, 3.0]))
    assert found.between == pytest.approx(1 / 5)
    assert found.between_by_chance == pytest.approx(1 / 3)
    assert recommend(found).learned_weights == "unlikely"


def test_diabetes_sites_are_not_alike() -> None:
    env = environment("diabetes-sites")
    found, data = measured(env), env.load()
    y = data.y.numpy().ravel().astype(np.float64)
    within = sum((n - 1) * found.targets[key]["sd"] ** 2 for key, n in zip(data.keys, data.sizes, strict=True))
    assert found.between == pytest.approx(1 - within / ((y - y.mean()) ** 2).sum(), rel=1e-5)
    assert recommend(found).learned_weights == "perhaps"
    assert "28 % of their variance" in " ".join(recommend(found).reasons)


def test_classes_go_by_their_names() -> None:
    env = federation([[4, 0], [2, 3]]).replace(class_names=("ill", "well"))
    assert measured(env).sole_holders == {"well": "c1"}


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=5),
    participation_probability=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    clients_per_round=st.integers(1, 5),
)
def test_what_holds_for_all_federations(
    counts: list[list[int]], participation_probability: list[float], clients_per_round: int
) -> None:
    clients = len(counts)
    drawn = min(clients_per_round, clients)
    by_key = {f"c{k}": participation_probability[k] for k in range(clients)}
    found = measured(federation(counts, participation_probability=by_key, clients_per_round=drawn))
    assert all(-1e-12 <= value <= 1 for value in found.divergence.values())
    assert found.size_ratio >= 1
    sets = list(itertools.combinations(by_key.values(), drawn))
    assert found.nobody == pytest.approx(sum(math.prod(1 - r for r in each) for each in sets) / len(sets))
    assert found.expected_present == pytest.approx(sum(sum(each) for each in sets) / len(sets))
    doubled = measured(
        federation([[2 * n for n in row] for row in counts], participation_probability=by_key, clients_per_round=drawn)
    )
    assert doubled.divergence == pytest.approx(found.divergence)
    backwards = measured(
        federation([row[::-1] for row in counts], participation_probability=by_key, clients_per_round=drawn)
    )
    assert backwards.divergence == pytest.approx(found.divergence)


@pytest.mark.parametrize(
    ("counts", "settings", "verdict", "words"),
    [
        ([[20, 20], [21, 20]], {}, "unlikely", ("alike",)),
        ([[20, 20]], {}, "unlikely", ("one client",)),
        ([[20, 0], [0, 20]], {}, "likely", ("labels differ", "one client alone", "c0 (0)", "c1 (1)")),
        ([[20, 3], [4, 20]], {}, "perhaps", ("labels differ",)),
        ([[92, 6], [50, 50]], {}, "perhaps", ("labels differ", "c0 by 0.22")),
        ([[92, 6], [50, 50], [50, 50], [50, 50]], {}, "perhaps", ("labels differ", "c0 by 0.33")),
        ([[30, 0], [50, 50], [50, 50], [50, 50]], {}, "perhaps", ("one class only: c0 (0)",)),
        ([[450, 250], [300, 400]], {}, "unlikely", ("differ a little", "0.11 on average")),
        ([[20, 20], [2, 2]], {}, "perhaps", ("10 times",)),
        (
            [[20, 20], [20, 20]],
            {"participation_probability": 0.8, "clients_per_round": 1},
            "perhaps",
            ("0.8 of 2", "remembers"),
        ),
        ([[20, 20], [20, 20]], {"epochs": {"c0": 1, "c1": 4}}, "likely", ("4 times as long",)),
        ([[20, 20], [20, 20]], {"participation_probability": {"c0": 1, "c1": 0.1}}, "likely", ("0.9 apart",)),
    ],
)
def test_outlook(counts: list[list[int]], settings: dict[str, Any], verdict: str, words: tuple[str, ...]) -> None:
    seen = recommend(measured(federation(counts, **settings)))
    assert seen.learned_weights == verdict
    for word in words:
        assert word in " ".join(seen.reasons)


@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_rare_class_at_one_client_is_never_called_alike(others: int) -> None:
    """92 : 6 beside 50 : 50, whoever else there is."""
    found = recommend(measured(federation([[92, 6], [50, 50], *[[50, 50]] * others])))
    assert found.learned_weights == "perhaps"
    assert not any("alike in labels" in reason for reason in found.reasons)
    assert any("c0 by 0." in reason for reason in found.reasons)


def test_one_class_alone_is_nothing_to_learn() -> None:
    found = recommend(measured(federation([[30, 0], [40, 0]])))
    assert found.reasons == ("every training sample is of class 0, so there is nothing to tell apart.",)
    assert found.warnings == ("check the labels: a model needs samples of at least two classes.",)


def test_rounds_without_anybody_are_warned_of() -> None:
    assert "25 %" in recommend(measured(federation([[2, 2], [2, 2]], participation_probability=0.5))).warnings[0]
    assert not recommend(measured(federation([[2, 2], [2, 2]], participation_probability=0.9))).warnings


@pytest.mark.parametrize("name", ["digits-label-skew", "digits-compute-skew", "digits-flaky"])
def test_bundled_federations_where_learned_weights_gain(name: str) -> None:
    assert recommend(measured(environment(name))).learned_weights == "likely"


def test_the_committed_runs_bear_the_outlook_out() -> None:
    """Sole classes always gained; what is called unlikely never gained a point by learned weights."""
    page = Path(__file__).parents[2] / "docs" / "results" / "outlook" / "results.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if "±" in line]
    seen = [(row[6], int(row[2]), float(row[8])) for row in rows]
    assert {verdict for verdict, _, _ in seen} == {"likely", "perhaps", "unlikely"}
    for verdict, sole, gain in seen:
        if sole:
            assert verdict == "likely" and gain > 0
        if verdict == "unlikely":
            assert gain < 1
