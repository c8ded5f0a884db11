"""A rule with parameters: its features worked by hand, FedAvg at its start, and what holds for all inputs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedunfold as fu
from fedunfold.core.messages import ClientMetrics, ClientUpdates, OpenUpdates
from fedunfold.rules.families import FAMILIES, Family
from fedunfold.rules.features import (
    CLIENT_FEATURES,
    PRIVATE_CLIENT_FEATURES,
    PRIVATE_ROUND_FEATURES,
    ROUND_FEATURES,
    RoundFeatures,
    read_features,
)
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import describe_rule, renamed
from fedunfold.rules.unfolded import PrivateRule, UnfoldedRule, initial_parameters


def round_of(
    t: int,
    rows: Sequence[Sequence[float]],
    sizes: Sequence[int],
    steps: Sequence[int],
    here: Sequence[int] | None = None,
) -> ClientUpdates:
    """A round in which the clients `here` send the rows."""
    clients = list(range(len(sizes))) if here is None else list(here)
    participated = torch.zeros(len(sizes), dtype=torch.bool)
    participated[clients] = True
    return ClientUpdates(
        round=t,
        client_ids=tuple(f"client-{k}" for k in range(len(sizes))),
        num_examples=torch.tensor(sizes),
        participated=participated,
        num_steps=torch.tensor(steps),
        updates=OpenUpdates(
            torch.tensor(clients),
            torch.tensor(rows, dtype=torch.float64).reshape(len(clients), len(rows[0]) if rows else 2),
        ),
    )


def after_a_round(report: ClientUpdates) -> ClientUpdates:
    """With ū = (3/2, 1/2)."""
    return replace(report, previous=torch.tensor([1.5, 0.5], dtype=torch.float64))


def reporting(report: ClientUpdates) -> ClientUpdates:
    """With the norms that clients report where they are asked for them."""
    norms = torch.full((len(report.client_ids),), torch.nan, dtype=torch.float64)
    norms[report.updates.clients] = report.updates.rows.norm(dim=1)
    return replace(report, metrics=ClientMetrics(norm=norms))


def far_from_fedavg(family: Family = "network") -> ParametricRule:
    drawn = torch.Generator().manual_seed(1)
    params = {
        name: value + torch.randn(value.shape, generator=drawn, dtype=torch.float64)
        for name, value in FAMILIES[family].initial(8, 0).params.items()
    }
    return FAMILIES[family](params, horizon=10)


def named(values: Tensor, names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, values.movedim(-1, 0).tolist(), strict=True))


def test_features_by_hand() -> None:
    """p = (3/4, 1/4), m = (2, 0) and (0, 2): m̄ = (3/2, 1/2), ‖m̄‖² = 5/2; two rounds alike, then ū = m̄."""
    report = round_of(0, [[2, 0], [0, 2]], sizes=[30, 10], steps=[6, 2])
    found = read_features(report, None, horizon=4)
    of_clients, of_round = named(found.of_clients, CLIENT_FEATURES), named(found.of_round, ROUND_FEATURES)
    assert of_clients["size"] == pytest.approx([math.log(1.5), math.log(0.5)])
    assert of_clients["steps"] == pytest.approx([math.log(1.5), math.log(0.5)])
    assert of_clients["norm"] == pytest.approx([0, 0])
    assert of_clients["agreement"] == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10)])
    assert of_clients["redundancy"] == pytest.approx([math.log(0.75), math.log(0.25)])
    assert of_clients["persistence"] == of_clients["staleness"] == of_clients["presences"] == pytest.approx([0, 0])
    expected = {
        "spread": math.log(4 / 2.5),
        "turn": 0,
        "growth": 0,
        "last_step": 0,
        "unevenness": 0,
        "progress": 0,
        "age": 0,
    }
    expected |= {"clients": math.log(2), "effort": math.log(4)}
    assert of_round == pytest.approx(expected)

    _, state = UnfoldedRule(initial_parameters(4, 0), 4)(report, None)
    again = replace(
        round_of(1, [[4, 0], [0, 4]], sizes=[30, 10], steps=[6, 2]), previous=torch.tensor([1.5, 0.5]).double()
    )
    found = read_features(again, state, horizon=4)
    of_clients, of_round = named(found.of_clients, CLIENT_FEATURES), named(found.of_round, ROUND_FEATURES)
    assert of_clients["persistence"] == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10)])
    assert of_round["turn"] == pytest.approx(1)
    assert of_round["growth"] == pytest.approx(math.log(2))
    assert of_round["progress"] == pytest.approx(1 / 4)
    assert of_round["age"] == pytest.approx(math.log(2))


def test_what_is_not_known_is_in_no_mean() -> None:
    """Of three clients one reports its steps and one sends nothing but zeros."""
    report = round_of(0, [[2, 0], [0, 2], [0, 0]], sizes=[10, 10, 10], steps=[0, 8, 0])
    found = read_features(report, None, horizon=4)
    of_clients, of_round = named(found.of_clients, CLIENT_FEATURES), named(found.of_round, ROUND_FEATURES)
    assert of_clients["steps"] == [0, 0, 0]
    assert of_round["effort"] == pytest.approx(math.log(8))
    assert of_clients["norm"] == pytest.approx([0, 0, 0])
    found = read_features(after_a_round(replace(report, round=1)), found.state, horizon=4)
    assert named(found.of_clients, CLIENT_FEATURES)["persistence"][2] == 0


def test_a_client_with_another_id_keeps_its_rounds() -> None:
    rule = far_from_fedavg()
    _, state = rule(round_of(0, [[2, 0], [0, 2]], sizes=[30, 10], steps=[6, 2]), None)
    _, state = rule(round_of(1, [[2, 0], [0, 2]], sizes=[30, 10], steps=[6, 4]), state)
    assert renamed(rule, state, "client-1", "bob")["seen"]["bob"] == [2, 1, 4]
    after = renamed(rule, state, "client-1", "client-0")
    assert after["seen"] == {"client-0": [4, 1, 4]} and after["norm"] == state["norm"]
    assert renamed(rule, state, "nobody", "bob") is state and renamed(rule, None, "a", "b") is None
    assert renamed(fu.size(), state, "client-1", "bob") is state


def test_private_features_by_hand() -> None:
    """Round 1 of m = (2, 0) and (0, 2) again, after Θ = (3/4, 1/4), ū = (3/2, 1/2) and, before that, ū' = (0, 1)."""
    report = reporting(
        replace(round_of(1, [[2, 0], [0, 2]], [30, 10], [6, 2]), previous=torch.tensor([1.5, 0.5]).double())
    )
    state = {"seen": {}, "square": 4.0, "before": torch.tensor([0.0, 1.0]).double()}
    found = read_features(report, state, 4, PRIVATE_CLIENT_FEATURES, PRIVATE_ROUND_FEATURES)
    of_clients = named(found.of_clients, PRIVATE_CLIENT_FEATURES)
    of_round = named(found.of_round, PRIVATE_ROUND_FEATURES)
    assert of_clients["norm"] == pytest.approx([0, 0])
    assert of_clients["persistence"] == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10)])
    assert of_round["last_spread"] == pytest.approx(math.log(4 / 2.5))
    assert of_round["last_turn"] == pytest.approx(1 / math.sqrt(10))
    assert of_round["last_growth"] == pytest.approx(math.log(2.5) / 2)
    assert of_round["unevenness"] == pytest.approx(math.log(2 * 2.5 / 2**2))
    _, after = PrivateRule.initial(4, 0)(report, state)
    assert after["square"] == pytest.approx(4.0) and after["before"].tolist() == [1.5, 0.5]


def test_coordinates_that_never_move_make_no_update_uneven() -> None:
    """As with the weights of pixels that are always black; a step of the same size everywhere is even."""
    report = round_of(1, [[2, 0, 0], [0, 2, 0]], [30, 10], [6, 2])
    for previous, uneven in (([1.0, -1.0, 0.0], 0.0), ([3.0, 0.0, 4.0], math.log(50 / 49)), ([0.0, 0.0, 0.0], 0.0)):
        given = replace(report, previous=torch.tensor(previous).double())
        found = read_features(given, None, 4, CLIENT_FEATURES, ("unevenness",)).of_round
        assert found.tolist() == pytest.approx([uneven])


def test_the_last_step_is_that_of_the_decision_without_momentum() -> None:
    rule, report = far_from_fedavg(), round_of(0, [[2, 0], [0, 2]], [30, 10], [6, 2])
    decision, state = rule(report, None)
    found = read_features(after_a_round(replace(report, round=1)), state, None, CLIENT_FEATURES, ("last_step",))
    assert found.of_round.tolist() == pytest.approx([math.log(decision.step / (1 - decision.momentum))])
    assert found.of_round.abs() > 0.01


def test_norms_of_clients_that_sent_nothing_are_remembered() -> None:
    rule = PrivateRule.initial(4, 0)
    first = reporting(round_of(0, [[3, 4], [0, 1]], [10, 10], [1, 1]))
    _, state = rule(first, None)
    second = reporting(round_of(1, [[0, 5]], [10, 10], [1, 0], here=[0]))
    second = replace(second, remembered=OpenUpdates(torch.arange(2), torch.tensor([[0.0, 5.0], [0.0, 1.0]]).double()))
    found = rule.read(second, state)
    assert named(found.of_clients, PRIVATE_CLIENT_FEATURES)["norm"] == pytest.approx(
        [math.log(25 / 13) / 2, math.log(1 / 13) / 2]
    )


def test_only_what_is_needed_is_measured() -> None:
    """A rule that reads counts touches no update, and a private one only what a server of secure sums has."""

    class Closed:
        clients = torch.arange(2)

        def inner_products(self, vector: Tensor) -> Tensor:
            return torch.tensor([torch.nan, 1.0], dtype=torch.float64)

    report = reporting(round_of(1, [[2, 0], [0, 2]], [30, 10], [6, 2]))
    report = after_a_round(replace(report, updates=Closed()))  # type: ignore[arg-type]
    found = PrivateRule.initial(4, 0).read(report, None)
    persistence = named(found.of_clients, PRIVATE_CLIENT_FEATURES)["persistence"]
    assert persistence == pytest.approx([0, 1 / 2 / math.sqrt(2.5)]), "of a client that does not answer it counts as 0"
    assert PrivateRule.initial(4, 0).required_metrics == {"norm"}
    assert UnfoldedRule.initial(4, 0).required_metrics == set()
    with pytest.raises(AttributeError):
        UnfoldedRule.initial(4, 0).read(report, None)


def test_presences_count_and_an_unknown_horizon_is_marked() -> None:
    rule = UnfoldedRule(initial_parameters(4, 0))
    _, state = rule(round_of(0, [[1, 0], [0, 1]], [10, 10, 10], [1, 1, 0], here=[0, 1]), None)
    found = read_features(round_of(1, [[1, 0], [0, 1]], [10, 10, 10], [1, 0, 1], here=[0, 2]), state, None)
    # Client 0 for the second time, client 2 for the first: (1 + 2, 1 + 1) against their mean 5/2.
    assert named(found.of_clients, CLIENT_FEATURES)["presences"] == pytest.approx([math.log(1.2), math.log(0.8)])
    assert named(found.of_round, ROUND_FEATURES)["progress"] == -1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from(get_args(Family)), st.booleans())
def test_numpy_decides_as_tensors_do(seed: int, clients: int, family: Family, bounded: bool) -> None:
    """What a rule does and what is differentiated are one formula, within its ranges and beyond them."""
    drawn, rule = torch.Generator().manual_seed(seed), far_from_fedavg(family)
    rows = torch.randn(clients, 4, generator=drawn, dtype=torch.float64).tolist()
    sizes = torch.randint(1, 100, (clients,), generator=drawn).tolist()
    report = reporting(round_of(2, rows, sizes, [1] * clients))
    report = replace(report, previous=torch.randn(4, generator=drawn, dtype=torch.float64))
    if bounded:
        features = len(rule.client_features) + len(rule.round_features)
        rule = replace(rule, ranges=torch.stack([-torch.ones(features), torch.ones(features)]).double())
    decision, _ = rule(report, None)
    expected = rule.decide(rule.read(report, None), clients)
    torch.testing.assert_close(decision.weights, expected.weights, rtol=1e-12, atol=1e-12)
    found = torch.tensor([decision.step, decision.momentum, decision.trust], dtype=torch.float64)
    torch.testing.assert_close(
        found, torch.stack([expected.step, expected.momentum, expected.trust]), rtol=1e-12, atol=1e-12
    )


def without_last_layers(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(v) if name.startswith(("score.1", "step.1")) else v for name, v in params.items()}


def test_without_last_layers_it_is_fedavg_and_it_starts_near_to_it() -> None:
    params = initial_parameters(32, 0)
    start = UnfoldedRule(params, 5)(round_of(0, [[1, 2], [3, 4], [-5, 6]], [30, 10, 40], [3, 1, 4]), None)[0]
    assert start.weights.tolist() == pytest.approx([3 / 8, 1 / 8, 4 / 8])
    assert start.momentum == pytest.approx(0.9 * 0.09 / 1.09) and start.trust == pytest.approx(0.09 / 1.09)
    assert start.step == pytest.approx(1 - start.momentum)
    decision, _ = UnfoldedRule(without_last_layers(params), 5)(
        round_of(0, [[1, 2], [3, 4], [-5, 6]], [30, 10, 40], [3, 1, 4]), None
    )
    assert decision.weights.tolist() == pytest.approx([3 / 8, 1 / 8, 4 / 8])
    assert decision.step == 1 and decision.momentum == decision.trust == 0


def test_a_round_without_updates_decides_nothing() -> None:
    decision, state = far_from_fedavg()(round_of(0, [], [30, 10], [0, 0], here=[]), None)
    assert decision.weights.tolist() == [0.75, 0.25]
    assert decision.step == 1 and decision.momentum == 0 and state is None


numbers = st.floats(-100, 100, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from(get_args(Family)))
def test_weights_lie_on_the_simplex_and_follow_the_clients(data: st.DataObject, clients: int, family: Family) -> None:
    """Whatever is sent, also zeros; relisting the clients relists the weights."""
    rows = [data.draw(st.lists(numbers, min_size=3, max_size=3)) for _ in range(clients)]
    sizes = [data.draw(st.integers(1, 1000)) for _ in range(clients)]
    steps = [data.draw(st.integers(0, 50)) for _ in range(clients)]
    previous = torch.tensor(data.draw(st.lists(numbers, min_size=3, max_size=3)), dtype=torch.float64)
    rule = far_from_fedavg(family)
    decision, _ = rule(replace(reporting(round_of(2, rows, sizes, steps)), previous=previous), None)
    assert float(decision.weights.sum()) == pytest.approx(1)
    assert bool((decision.weights >= 0).all())
    assert 0 <= decision.momentum <= 0.9 and 0 <= decision.step <= 10.000001
    order = data.draw(st.permutations(range(clients)))
    relisted = round_of(2, [rows[k] for k in order], [sizes[k] for k in order], [steps[k] for k in order])
    other, _ = rule(replace(reporting(relisted), previous=previous), None)
    torch.testing.assert_close(other.weights, decision.weights[list(order)], rtol=1e-6, atol=1e-9)
    assert other.step == pytest.approx(decision.step, rel=1e-6)


def test_other_ranges_make_another_rule() -> None:
    rule = far_from_fedavg()
    ranges = torch.stack([-torch.ones(15), torch.ones(15)]).double()
    bounded, narrower = replace(rule, ranges=ranges), replace(rule, ranges=0.5 * ranges)
    found = {describe_rule(each)["parameters"] for each in (rule, bounded, narrower, replace(narrower))}
    assert len(found) == 3


def test_outside_its_range_it_leans_back_to_fedavg() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {name: value + 0.1 for name, value in initial_parameters(8, 1).items()}
    shares = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    own = torch.rand(3, len(CLIENT_FEATURES), generator=generator, dtype=torch.float64)
    of_round = torch.rand(len(ROUND_FEATURES), generator=generator, dtype=torch.float64)
    lowest = torch.zeros(own.shape[1] + len(of_round), dtype=torch.float64)
    ranges = torch.stack([lowest, lowest + 1])
    known, bounded = UnfoldedRule(params), UnfoldedRule(params, ranges=ranges)
    inside = RoundFeatures(torch.arange(3), shares, own, of_round, {})
    assert torch.equal(known.decide(inside, 3).weights, bounded.decide(inside, 3).weights)
    far = of_round.clone()
    far[0] = 25.0
    outside = RoundFeatures(torch.arange(3), shares, own, far, {})
    decided = bounded.decide(outside, 3)
    assert torch.allclose(decided.weights, shares, atol=1e-9)
    assert float(decided.step) == pytest.approx(1.0) and float(decided.momentum) == pytest.approx(0.0, abs=1e-9)
    assert float(known.decide(outside, 3).step) != pytest.approx(1.0, abs=1e-3)
    # A client out of range is weighted as by its size; what the round decides together stays.
    strange = own.clone()
    strange[0, 0] = 25.0
    decided = bounded.decide(RoundFeatures(torch.arange(3), shares, strange, of_round, {}), 3)
    free = known.decide(RoundFeatures(torch.arange(3), shares, strange, of_round, {}), 3)
    assert float(decided.step) == float(free.step)
    assert not torch.equal(decided.weights, free.weights)
