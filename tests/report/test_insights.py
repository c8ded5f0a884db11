"""Findings against numbers worked out by hand."""

from dataclasses import replace

import pytest

from fedunfold.core.task import ACCURACY
from fedunfold.report.grouping import Group, group_runs
from fedunfold.report.insights import findings, ranked
from fedunfold.report.learning import only_holders
from fedunfold.report.noise import gain
from fedunfold.runs.schema import RejectedClient
from tests.support.run_records import federation, group, learned, method, run

EVEN = ((4, 4, 4), (4, 4, 4))


def test_the_outcome_with_spread_and_pairs_of_trials() -> None:
    found = findings(group(method("fedavg", [[10, 60], [20, 62]]), method("dr-fedavg", [[30, 64], [40, 61]])))
    # Finals 60 and 62: mean 61, sd √2; 64 and 61: mean 62.5, sd 3/√2; one of the two trials is better.
    assert (
        found[0]
        == "dr-fedavg ends at 62.5 ± 2.1 % against 61.0 ± 1.4 % of fedavg: 1.5 points more, better in 1 of 2 trials."
    )


def test_one_trial_says_so() -> None:
    found = findings(group(method("fedavg", [[10, 60]])))
    assert found[0] == "fedavg ends at 60.0 % (a single trial: how much it varies is not known)."


def test_a_gain_of_the_last_round_only() -> None:
    base, late = method("fedavg", [[50, 60, 70, 80]]), method("late", [[40, 50, 60, 90]])
    assert "late lies below fedavg in 3 of 4 rounds and above it in the last: it is the final model that gains." in (
        findings(group(base, late))
    )
    assert "fedavg lies above" not in " ".join(findings(group(base, late)))
    early = method("early", [[60, 70, 80, 70]])
    assert "early lies above fedavg in 3 of 4 rounds, but ends below it." in findings(group(base, early))


def test_no_difference_is_not_called_one() -> None:
    found = findings(group(method("fedavg", [[60.0]]), method("fednova", [[60.01]])))
    assert "no difference" in found[0]


def test_who_gains_and_who_loses_among_the_classes() -> None:
    found = findings(
        group(
            method("fedavg", [[60]], by_class=(90, 10, 50)),
            method("dr", [[60]], by_class=(80, 70, 50)),
        )
    )
    assert (
        "With dr against fedavg, 1 class gains and 1 loses; class 1 gains most, 10.0 → 70.0 %; "
        "class 0 loses most, 90.0 → 80.0 %."
    ) in found


def test_the_largest_of_many_classes_has_to_beat_the_noise_of_many() -> None:
    """A class of 100 test rows rises from 30 % to 44 %. For it alone that is 1.057 half-widths,
    14/(1.96 √(0.3·0.7/100 + 0.44·0.56/100)·100), for the largest of ten, with z = 2.807 in the place of 1.96, 0.738."""
    names = tuple(f"class-{c}" for c in range(10))
    record = federation(((1,) * 10, (1,) * 10), class_names=names).model_copy(update={"test_samples": 1000})
    base, mine = (method(name, [[50]], by_class=(first, *[50] * 9)) for name, first in (("fedavg", 30), ("dr", 44)))
    alone = gain(mine.class_accuracy[:, 0], base.class_accuracy[:, 0], ACCURACY, [100])
    assert alone.effect == pytest.approx(1.0573, abs=0.001)
    assert gain(
        mine.class_accuracy[:, 0], base.class_accuracy[:, 0], ACCURACY, [100], largest_of=10
    ).effect == pytest.approx(0.7383, abs=0.001)
    found = ranked(group(base, mine, of=record))
    assert not any("class-0 gains most" in text for text in found.first)
    assert any("class-0 gains most" in text for text in found.more)


def test_classes_without_test_samples_are_left_out() -> None:
    nan = float("nan")
    found = findings(group(method("fedavg", [[60]], by_class=(90, nan, 50))))
    assert "Class 2 is the weakest of fedavg: 50.0 % of its test samples right." in found
    assert not any("weakest" in text for text in findings(group(method("fedavg", [[60]], by_class=(nan, nan, nan)))))


def test_the_worst_served_client_of_every_method() -> None:
    found = findings(
        group(
            method("fedavg", [[60]], by_client=(20, 70)),
            method("dr", [[60]], by_client=(55, 55)),
        )
    )
    assert (
        "The worst-served client, by the final model's accuracy on its own training data, is north with 20.0 % under "
        "fedavg; north and 1 more with 55.0 % under dr."
    ) in found


def test_a_client_that_alone_holds_classes() -> None:
    found = findings(group(weights={"duw": learned([[0.5, 0.5], [0.7, 0.3]])}))
    # Means over two rounds 0.6 and 0.4, against 8/20 and 12/20.
    assert found[:2] == [
        "Client north holds the only samples of class 0 and counts 0.60 on average over the rounds, 0.70 in the last, "
        "against 0.40 by size.",
        "Client south holds the only samples of class 2 and counts 0.40 on average over the rounds, 0.30 in the last, "
        "against 0.60 by size.",
    ]


def test_only_holders_by_hand() -> None:
    assert only_holders(federation(((1, 0, 3, 0), (0, 0, 2, 9)))) == {0: (0,), 1: (3,)}
    assert only_holders(federation(EVEN)) == {}


def test_without_such_clients_those_furthest_from_their_size() -> None:
    record = federation(EVEN, participation_probability=(0.25, 1.0), epochs=(1, 3))
    found = findings(group(weights={"duw": learned([[0.2, 0.8]])}, of=record))
    assert found[:2] == [
        "Client south (reachable in 100 % of the rounds, 3 epochs a round) is lifted furthest above its size: it "
        "counts 0.80 on average over the rounds, 0.80 in the last, against 0.50 by size.",
        "Client north (reachable in 25 % of the rounds, 1 epoch a round) is held furthest below its size: it counts "
        "0.20 on average over the rounds, 0.20 in the last, against 0.50 by size.",
    ]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((4.0, 3.0), "The outer loss fell from 4 to 3 in 2 iterations."),
        ((4.0, 5.0), "The outer loss rose from 4 to 5 in 2 iterations, and was lowest at iteration 1 with 4."),
        ((4.0, 1.0, 3.0), "The outer loss fell from 4 to 3 in 3 iterations, and was lowest at iteration 2 with 1."),
    ],
)
def test_the_outer_loss(losses: tuple[float, ...], told: str) -> None:
    assert findings(group(weights={"duw": learned(losses=losses)}))[-1] == told


def test_runs_of_one_federation_are_compared_and_named() -> None:
    runs = [run(method("duw", [[70]]), label="b"), run(method("fedavg", [[60]]), label="a")]
    (together,) = group_runs(runs)
    assert together.baseline is not None
    assert together.baseline.label == "fedavg · a"
    assert findings(together)[0].startswith("duw · b ends at 70.0 % against 60.0 % of fedavg · a: 10.0 points more")


def test_runs_of_other_federations_are_not() -> None:
    other = federation(name="elsewhere")
    assert len(group_runs([run(method("fedavg", [[60]])), run(method("duw", [[70]]), of=other)])) == 2


def test_learned_methods_stand_first_and_fedavg_is_what_they_are_held_against() -> None:
    methods = [method("dr", [[1]]), method("duw", [[2]]), method("fedavg", [[3]])]
    found = group(*methods, weights={"duw": learned()})
    assert [method.label for method in found.others] == ["duw", "dr"]
    assert Group((run(methods[0]),)).baseline is None


def test_classes_go_by_their_names() -> None:
    named = federation(class_names=("ill", "well", "unsure"))
    base, mine = method("fedavg", [[60]], by_class=(90, 10, 50)), method("dr", [[60]], by_class=(80, 70, 50))
    told = " ".join(findings(group(base, mine, weights={"duw": learned()}, of=named)))
    assert "class well gains most, 10.0 → 70.0 %; class ill loses most, 90.0 → 80.0 %." in told
    assert "Client south holds the only samples of class unsure and" in told
    assert "Class well is the weakest of fedavg" in " ".join(findings(group(base, of=named)))


def test_who_was_rejected_how_often_and_why() -> None:
    rejected = replace(method("fedavg", [[50, 60]]), rejected=(RejectedClient("south", 1, "has a NaN"),))
    assert "Client south was rejected in 1 of 2 rounds: it has a NaN." in findings(group(rejected))
    many = tuple(RejectedClient(f"site-{k}", 3, "has a NaN") for k in range(5))
    found = findings(group(method("fedavg", [[1]]), replace(method("dr", [[1, 2], [3, 4]]), rejected=many)))
    assert "Client site-3 was rejected in 3 of 4 rounds of 2 trials under dr: it has a NaN." in found
    assert "1 more client was rejected under dr, no more often than these." in found


def test_a_run_that_was_stopped_says_so_first() -> None:
    stopped = replace(run(method("fedavg", [[60]]), label="b"), stopped=True)
    ending = "was stopped and is not finished: what had ended is shown, and it can be resumed."
    assert findings(Group((stopped,)))[0] == f"This run {ending}"
    assert findings(Group((run(method("duw", [[70]])), stopped)))[0] == f"The run b {ending}"
