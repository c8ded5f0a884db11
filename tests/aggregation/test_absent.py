"""A round put together by hand, for every way to treat absent clients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedunfold.aggregation.absent import Absent, Contributions, check_absent, coefficients, makes_step
from fedunfold.core.errors import InputError
from fedunfold.core.federation import ClientUpdates
from fedunfold.server.optimizers import adam
from fedunfold.training.loop import Algorithm, Server, aggregate
from tests.support.reports import report

WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
A, B, C = [2.0, 0.0], [1.0, 1.0], [0.0, 10.0]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def round_of(t: int, updates: dict[str, list[float]]) -> ClientUpdates:
    """Clients a, b and c, of whom those with an update are there."""
    rows = torch.tensor([updates[key] for key in sorted(updates)], dtype=torch.float64).reshape(-1, 2)
    present = [key in updates for key in "abc"]
    return replace(report([1, 1, 1], round=t, present=present), updates=rows)


def models(absent: Absent, rounds: Sequence[dict[str, list[float]]], weights: Tensor = WEIGHTS) -> list[list[float]]:
    """w after every round, from w = (1, 1)."""
    algorithm = Algorithm(absent=absent)
    server = Server.start(vector(1, 1), algorithm)
    found = []
    for t, updates in enumerate(rounds):
        server, _ = aggregate(server, round_of(t, updates), weights, algorithm)
        found.append(server.model.tolist())
    return found


ROUNDS = [{"b": B}, {"a": A, "c": C}, {}, {"b": [0.0, -10.0]}]


def test_keep() -> None:
    # Σ Θ_k w_k with w_k = w for the absent: + 0.3 b, + 0.5 a + 0.2 c, nothing, + 0.3 (0, −10).
    expected = [[1.3, 1.3], [2.3, 3.3], [2.3, 3.3], [2.3, 0.3]]
    assert [pytest.approx(w) for w in expected] == models("keep", ROUNDS)


def test_drop() -> None:
    # + b, + (5/7) a + (2/7) c, nothing, + (0, −10).
    expected = [[2, 2], [2 + 10 / 7, 2 + 20 / 7], [2 + 10 / 7, 2 + 20 / 7], [2 + 10 / 7, 20 / 7 - 8]]
    assert [pytest.approx(w) for w in expected] == models("drop", ROUNDS)


def test_remember() -> None:
    # + 0.3 b (a and c have sent nothing yet), + 0.5 a + 0.3 b + 0.2 c twice, then b's new one in its place.
    expected = [[1.3, 1.3], [2.6, 3.6], [3.9, 5.9], [4.9, 4.9]]
    assert [pytest.approx(w) for w in expected] == models("remember", ROUNDS)


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_everybody_there(absent: Absent) -> None:
    assert models(absent, [{"a": A, "b": B, "c": C}]) == [pytest.approx([2.3, 3.3])]


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_nobody_there(absent: Absent) -> None:
    assert models(absent, [{}, {}]) == [[1, 1], [1, 1]]


def test_present_clients_without_weight_move_nothing_under_drop() -> None:
    assert models("drop", [{"b": B, "c": C}], vector(1, 0, 0)) == [[1, 1]]


def test_a_remembered_update_lasts_while_others_come_and_go() -> None:
    rounds = [{"a": A}, {"c": C}, {"c": [0.0, 5.0]}]
    assert models("remember", rounds) == [[2, 1], [3, 3], [4, 4]]


def test_memory_holds_the_last_update_of_everybody() -> None:
    algorithm = Algorithm(absent="remember")
    server = Server.start(vector(1, 1), algorithm)
    server, _ = aggregate(server, round_of(0, {"a": A, "c": C}), WEIGHTS, algorithm)
    server, put_together = aggregate(server, round_of(1, {"c": B}), WEIGHTS, algorithm)
    entering = put_together.contributions
    assert isinstance(entering, Contributions)
    assert entering.clients.tolist() == [0, 2]
    assert entering.updates().tolist() == [A, B]
    assert {k: kept.tolist() for k, kept in server.memory.items()} == {0: A, 2: B}


def test_only_the_dropping_server_rests_without_clients() -> None:
    """Adam's momentum goes on under `keep`; under `drop` its state and the model stay as they are."""
    for absent, rests in (("keep", False), ("remember", False), ("drop", True)):
        algorithm = Algorithm(server=adam(0.1), absent=absent)  # type: ignore[arg-type]
        server = Server.start(vector(1, 1), algorithm)
        server, _ = aggregate(server, round_of(0, {"a": A}), WEIGHTS, algorithm)
        after, put_together = aggregate(server, round_of(1, {}), WEIGHTS, algorithm)
        assert torch.equal(after.model, server.model) == rests
        assert all(map(torch.equal, after.moments, server.moments)) == rests
        assert (put_together.direction is None) == rests


def test_adam_gets_the_direction() -> None:
    algorithm = Algorithm(server=adam(0.1, beta1=0.5, beta2=0.5, tau=1.0))
    server, _ = aggregate(Server.start(vector(0, 0), algorithm), round_of(0, {"a": [4, 0]}), WEIGHTS, algorithm)
    # u = 2: m = 1, v = ½ + 2 = 2.5
    assert server.model.tolist() == pytest.approx([0.1 / (2.5**0.5 + 1), 0])


def test_dropped_coefficients_carry_their_normalisation_to_the_weights() -> None:
    weights = WEIGHTS.clone().requires_grad_()
    alpha = coefficients(weights, torch.tensor([True, False, True]), "drop")
    assert alpha.tolist() == pytest.approx([5 / 7, 0, 2 / 7])
    # α_a = Θ_a/(Θ_a + Θ_c): ∂α_a/∂Θ_a = Θ_c/0.49, ∂α_a/∂Θ_c = −Θ_a/0.49
    (slope,) = torch.autograd.grad(alpha[0], weights)
    assert slope.tolist() == pytest.approx([0.2 / 0.49, 0, -0.5 / 0.49])


def test_other_coefficients_are_the_weights() -> None:
    nobody = torch.tensor([False] * 3)
    for absent in ("keep", "remember"):
        assert torch.equal(coefficients(WEIGHTS, nobody, absent), WEIGHTS)
    assert coefficients(WEIGHTS, nobody, "drop").tolist() == [0, 0, 0]
    assert [makes_step(nobody, absent) for absent in ("keep", "drop", "remember")] == [True, False, True]


def test_unknown_semantics_are_refused() -> None:
    with pytest.raises(InputError, match="'forget'; choose keep, drop or remember"):
        check_absent("forget")
