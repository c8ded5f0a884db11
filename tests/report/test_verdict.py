"""The verdict against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from fedunfold.core.task import PrimaryMetric
from fedunfold.report.grouping import Group
from fedunfold.report.insights import ranked
from fedunfold.report.noise import gain
from fedunfold.report.verdict import Verdict, verdict
from tests.support.run_records import federation, group, learned, method, run

T1, T2 = 12.706204736, 4.302652730  # Student's t at 0.975, of tables
Z = 1.959963985
RMSE = PrimaryMetric("rmse", greater_is_better=False, percentages=frozenset())
CONCORDANCE = PrimaryMetric("concordance", greater_is_better=True, percentages=frozenset())


def judged(found: Group) -> Verdict:
    made = verdict(found)
    assert made is not None
    return made


def test_the_interval_over_trials_and_test_samples() -> None:
    # d = 10, 8, 12: mean 10, s² = 4; means 82 and 72 of 200 rows.
    found = gain(np.array([82.0, 80, 84]), np.array([72.0, 72, 72]), PrimaryMetric(), [200])
    v = (0.82 * 0.18 + 0.72 * 0.28) / 200
    assert found.value == pytest.approx(10)
    assert found.half == pytest.approx((T2**2 * 4 / 3 + Z**2 * 1e4 * v) ** 0.5)
    assert found.covers == ("trials", "test samples")


def test_trials_that_agree_do_not_hide_a_small_test_set() -> None:
    found = gain(np.array([73.0, 73]), np.array([70.0, 70]), PrimaryMetric(), [185])
    assert found.half == pytest.approx(100 * Z * ((0.73 * 0.27 + 0.7 * 0.3) / 185) ** 0.5)
    assert found.half == pytest.approx(9.19, abs=0.01)
    assert not found.is_known


def test_the_mean_over_clients_has_the_variance_of_a_mean() -> None:
    mine, theirs = np.array([[90.0, 80]]), np.array([[70.0, 60]])
    found = gain(mine, theirs, PrimaryMetric(), [100, 50])
    v = ((0.9 * 0.1 + 0.7 * 0.3) / 100 + (0.8 * 0.2 + 0.6 * 0.4) / 50) / 4
    assert found.value == 20 and found.half == pytest.approx(100 * Z * v**0.5)
    # A client whose score is not known is no part of it.
    part = gain(np.array([[90.0, np.nan]]), theirs, PrimaryMetric(), [100, 50])
    assert part.half == pytest.approx(100 * Z * ((0.9 * 0.1 + 0.7 * 0.3) / 100) ** 0.5)
    assert gain(mine, theirs, PrimaryMetric(), [100, 0]).half is None  # rows that are not on record


def test_runs_of_other_draws_are_no_pairs() -> None:
    mine, theirs = np.array([1.0, 3.0]), np.array([11.0, 13.0])  # as pairs: s = 0
    assert gain(mine, theirs, RMSE, [9]).half == 0
    assert gain(mine, theirs, RMSE, [9], paired=False).half == pytest.approx(T1 * (2 / 2 + 2 / 2) ** 0.5)
    assert gain(mine, theirs, RMSE, [9]).value == 10  # lower is better


def test_what_is_used_gains_and_costs() -> None:
    found = judged(
        group(
            method("fedavg", [[70], [72]], held_out=[[60, 70], [60, 70]]),
            method("duw", [[80], [82]], held_out=[[50, 80], [50, 80]]),
            method("local", [[99], [99]], held_out=[[55, 75], [55, 75]], reference=True),
            weights={"duw": learned(losses=(4, 3, 2))},
            of=federation(test_samples=10_000, held_out=(400, 400)),
        )
    )
    # v = (0.81·0.19 + 0.71·0.29)/10000, and the trials agree: 1.96·100·√v = 1.17.
    assert found.over_fedavg is not None and found.over_fedavg.half == pytest.approx(1.175, abs=0.001)
    assert (found.method, found.within_noise, found.cheapest, found.learning_rounds) == ("duw", (), "duw", 6)
    assert [(worse.client, worse.than, worse.loss) for worse in found.worse_off or ()] == [("north", "fedavg", 10)]
    # Of both clients: v = (0.5·0.5 + 0.55·0.45 + 0.8·0.2 + 0.75·0.25)/400/4 = 0.000528, and 1.96·100·√v = 4.5.
    assert found.sentence == (
        "Use duw: of 2 federated methods it ends best, at 81.0 % test accuracy over 2 trials. It is 10.0 points better "
        "than fedavg (95 % interval +8.8 to +11.2 over trials and test samples). On what clients held out it is, in "
        "the mean of the clients, within noise of local training (95 % interval −4.5 to +4.5 over trials and test "
        "samples). Worse off on what they held out: north (10.0 points worse than under fedavg). Learning its weights "
        "takes 6 rounds of the federation beforehand."
    )


def test_within_noise_the_cheapest_is_named() -> None:
    methods = [method("duw", [[71.5], [71]]), method("dr", [[71], [71]]), method("fedavg", [[70], [71]])]
    found = judged(group(*methods, weights={"duw": learned()}))
    assert found.method == "duw"
    assert (found.within_noise, found.cheapest) == (("dr", "fedavg"), "fedavg")
    assert (
        "its lead over dr and fedavg is within noise. The cheapest of these is fedavg, with no rounds" in found.sentence
    )
    assert "to learn instead of 4 rounds." in found.sentence
    assert "Its gain of +0.8 points over fedavg is within noise (95 % interval −" in found.sentence
    assert "For whom it is worse is not known: clients held out nothing." in found.sentence


def test_one_trial_leaves_the_test_set() -> None:
    found = judged(group(method("fedavg", [[10]]), method("dr", [[90]])))
    assert found.over_fedavg is not None and found.over_fedavg.covers == ("test samples",)
    assert found.over_fedavg.half == pytest.approx(100 * Z * (2 * 0.09 / 30) ** 0.5)
    assert "over test samples alone: one trial does not tell how training varies" in found.sentence


def test_one_trial_of_a_score_that_is_no_fraction_leaves_nothing() -> None:
    found = judged(group(method("fedavg", [[5.0]]), method("dr", [[4.0]]), primary=RMSE))
    assert (found.method, found.within_noise) == ("dr", ())
    assert "It is 1 better than fedavg (how much of it is noise is not known)." in found.sentence
    assert found.as_json()["over_fedavg"] == {"gain": 1.0, "interval": None, "covers": []}


def test_lower_is_better_and_only_trials_are_covered() -> None:
    found = judged(group(method("fedavg", [[5.0], [5.2]]), method("dr", [[4.0], [4.1]]), primary=RMSE))
    # d = 1, 1.1: s²/n = 0.0025, so that t·0.05 = 0.6353.
    assert found.over_fedavg is not None and found.over_fedavg.half == pytest.approx(T1 * 0.05)
    assert found.sentence.startswith("Use dr: of 2 federated methods it ends best, at 4.05 test RMSE, lower is better")
    assert "1.05 better than fedavg (95 % interval +0.4147 to +1.685 over trials alone)" in found.sentence


def test_survival_is_judged_over_trials_alone() -> None:
    found = judged(group(method("fedavg", [[0.6], [0.6]]), method("dr", [[0.7], [0.7]]), primary=CONCORDANCE))
    assert (found.method, found.over_fedavg and found.over_fedavg.covers) == ("dr", ("trials",))
    undefined = group(method("fedavg", [[float("nan")]]), primary=CONCORDANCE)
    assert verdict(undefined) is None


def test_references_are_never_what_to_use() -> None:
    pooled, majority = (method(name, [[99]], reference=True) for name in ("pooled", "majority"))
    found = judged(group(pooled, method("fedavg", [[60]]), majority))
    assert found.sentence.startswith("fedavg is the only federated method here: 60.0 % test accuracy over 1 trial.")
    assert verdict(group(pooled, majority)) is None


def test_many_clients_are_counted() -> None:
    keys = [f"site-{k}" for k in range(5)]
    record = federation([[2, 2, 2]] * 5, [1.0] * 5, [1] * 5, keys, held_out=[9] * 5)
    worse = method("dr", [[80]], by_client=[50] * 5, held_out=[[40, 41, 42, 43, 44]])
    base = method("fedavg", [[60]], by_client=[50] * 5, held_out=[[50] * 5])
    found = judged(Group((run(base, worse, of=record),)))
    assert "site-0 (10.0 points worse than under fedavg), site-1 (9.0 " in found.sentence
    assert "site-2 (8.0 points worse than under fedavg) and 2 more." in found.sentence
    better = replace(worse, held_out=np.full((1, 5), 90.0))
    unharmed = judged(Group((run(base, better, of=record),))).sentence
    assert "No client does worse on what it held out than under fedavg." in unharmed


def test_losses_of_clients_within_noise_are_called_so() -> None:
    """Of 400 rows, 60 against 50 % is beyond 1.96 √((0.6·0.4 + 0.5·0.5)/400) = 6.9 points, and 58 against 55 is not."""
    of = federation(test_samples=10_000, held_out=(400, 400))
    base = method("fedavg", [[70], [70]], held_out=[[60, 58], [60, 58]])
    both = judged(group(base, method("dr", [[80], [80]], held_out=[[50, 55], [50, 55]]), of=of))
    lost = "Worse off on what they held out: north (10.0 points worse than under fedavg); within noise also south (3.0 "
    assert lost in both.sentence
    assert [worse.within_noise for worse in both.worse_off or ()] == [False, True]
    none = judged(group(base, method("dr", [[80], [80]], held_out=[[60, 55], [60, 55]]), of=of))
    assert (
        "For no client is it worse by more than noise; within noise for south (3.0 points worse than under fedavg)."
        in none.sentence
    )


def test_small_effects_are_folded_and_the_largest_stand_first() -> None:
    base, close = method("fedavg", [[60, 60], [60, 60]]), method("close", [[61, 61], [61, 61]])
    large, larger = method("large", [[80, 80], [80, 80]]), method("larger", [[97, 97], [97, 97]])
    pooled = method("pooled", [[99, 99], [99, 99]], reference=True)
    found = ranked(group(base, close, large, larger, pooled, of=federation(test_samples=100)))
    # Over 100 rows: 1 of ±13.6, 20 of ±12.4, 37 of ±10.2; a reference is none of the methods.
    assert [text.split(" ")[0] for text in found.first] == ["larger", "large"]
    assert any(text.startswith("close ends at") for text in found.more)
    assert any(text.startswith("pooled (reference) ends at") for text in found.more)
