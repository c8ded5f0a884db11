import math
from typing import Any

import pytest

from fedunfold.core.errors import InputError
from fedunfold.rules import fedfa
from tests.support.reports import report, weigh

NAN = math.nan
# −log₂(1/4) = 2 and −log₂(3/4) = 0.415037, scaled to sum 1.
QUARTER, THREE_QUARTERS = 0.8281445, 0.1718555


def test_worked_case() -> None:
    # Accuracies 1:3 give M̄; one participation each gives Ē = 1/2.
    weights, state = weigh(fedfa(), report([1, 99], accuracy=[0.25, 0.75]), None)
    assert weights.tolist() == pytest.approx([(QUARTER + 0.5) / 2, (THREE_QUARTERS + 0.5) / 2], abs=1e-7)
    assert state == {"a": 1, "b": 1}


def test_the_two_parts_alone() -> None:
    round_three = report([1, 1], round=3, accuracy=[0.3, 0.9])
    before: Any = {"a": 2}  # a comes for the third time, b for the first: F = 3, 1
    only_accuracy, after = weigh(fedfa(gamma=1), round_three, before)
    only_presence, _ = weigh(fedfa(gamma=0), round_three, before)
    assert only_accuracy.tolist() == pytest.approx([QUARTER, THREE_QUARTERS], abs=1e-7)
    assert only_presence.tolist() == pytest.approx([QUARTER, THREE_QUARTERS], abs=1e-7)
    assert after == {"a": 3, "b": 1}
    assert before == {"a": 2}


def test_gamma_is_the_share_of_accuracy() -> None:
    # M̄ = QUARTER for a, Ē = QUARTER for b: γ = 1/4 leaves a with QUARTER/4 + 3·THREE_QUARTERS/4.
    weights, _ = weigh(fedfa(gamma=0.25), report([1, 1], accuracy=[0.3, 0.9]), {"b": 2})
    assert weights.tolist() == pytest.approx([0.3359278, 0.6640722], abs=1e-7)


def test_only_participating_clients_count_and_are_counted() -> None:
    mine = fedfa()
    here = [True, False, True]
    weights, state = weigh(mine, report([1, 1, 1], participated=here, accuracy=[0.25, NAN, 0.75]), {"b": 7})
    assert weights.tolist() == pytest.approx([0.6640722, 0.0, 0.3359278], abs=1e-7)
    assert state == {"a": 1, "b": 7, "c": 1}


def test_an_accuracy_of_zero_becomes_the_small_argument() -> None:
    # Arguments 10⁻⁶, 1/2, 1/2: 19.931569 : 1 : 1.
    weights, _ = weigh(fedfa(gamma=1), report([1, 1, 1], accuracy=[0.0, 0.5, 0.5]), None)
    assert weights.tolist() == pytest.approx([0.908807, 0.045596, 0.045596], abs=1e-6)


def test_all_accuracies_zero_are_uniform() -> None:
    weights, _ = weigh(fedfa(gamma=1), report([1, 3], accuracy=[0.0, 0.0]), None)
    assert weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_one_participating_client_takes_all(accuracy: float) -> None:
    lone = report([3, 1], participated=[False, True], accuracy=[NAN, accuracy])
    weights, state = weigh(fedfa(), lone, None)
    assert weights.tolist() == [0.0, 1.0]
    assert state == {"b": 1}


def test_nobody_participates() -> None:
    weights, state = weigh(fedfa(), report([3, 1], participated=[False, False], accuracy=[NAN, NAN]), {"a": 1})
    assert weights.tolist() == [0.75, 0.25]
    assert state == {"a": 1}


def test_a_participating_client_without_accuracy_is_refused() -> None:
    with pytest.raises(InputError, match="'fedfa' in round 0 gives 'a' the weight nan"):
        weigh(fedfa(), report([1, 1], accuracy=[NAN, 0.5]), None)


def test_metrics_and_names() -> None:
    assert fedfa().required_metrics == {"accuracy"}
    assert [fedfa().name, fedfa(0.2).name] == ["fedfa", "fedfa(gamma=0.2)"]


@pytest.mark.parametrize("gamma", [-0.01, 1.01, NAN])
def test_bad_settings_are_refused(gamma: float) -> None:
    with pytest.raises(InputError, match="fedfa needs"):
        fedfa(gamma)
