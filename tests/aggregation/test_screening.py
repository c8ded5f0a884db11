"""Who is set aside, by hand and for all inputs, and that nothing of them is left."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.aggregation.screening import FilterResult, RejectedUpdate, check_update_filter, filter_updates
from fedunfold.config import environment
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.federation import ClientUpdates
from fedunfold.core.task import OuterLoss
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local.optimizers import nova
from fedunfold.rules import fedadp, size
from fedunfold.training.loop import Algorithm, Server, aggregate, run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unfold
from tests.support.federations import RUN, simulated, tiny
from tests.support.reports import report

LENGTHS = st.lists(st.floats(0.1, 10.0), min_size=5, max_size=9)


def lengths_of(*lengths: float, steps: list[int] | None = None, t: int = 0) -> ClientUpdates:
    """Clients with updates of these lengths along one axis; all with one step unless said otherwise."""
    found = report([1] * len(lengths), round=t, keys=[f"site-{k}" for k in range(len(lengths))])
    updates = torch.zeros(len(lengths), 3, dtype=torch.float64)
    updates[:, 1] = torch.tensor(lengths, dtype=torch.float64)
    return replace(found, updates=updates, steps=torch.tensor(steps or [1] * len(lengths)))


def names(sifted: FilterResult) -> list[str]:
    return [entry.client for entry in sifted.rejected]


def test_five_times_the_median_is_the_least_that_is_too_long() -> None:
    assert names(filter_updates(lengths_of(1, 1, 1, 1, 4.9), "norm", [])) == []
    found = filter_updates(lengths_of(1, 1, 1, 1, 5.2), "norm", [])
    reason = "sends an update 5.2 times as long as the median, of 5 times at most"
    assert found.rejected == (RejectedUpdate(0, "site-4", reason),)
    assert found.report.present.tolist() == [True] * 4 + [False]
    assert found.report.updates.shape == (4, 3)
    assert found.lengths[:4].tolist() == [0, 0, 0, 0]
    assert found.lengths[4].isnan()


def test_unlike_clients_widen_the_range() -> None:
    """x = log(1, 2, 4, 8, 64): m = log 4, |x − m| = log(4, 2, 1, 2, 16), s = 1.4826 log 2, and 4 · 2^5.19 = 146."""
    assert names(filter_updates(lengths_of(1, 2, 4, 8, 64), "norm", [])) == []
    assert names(filter_updates(lengths_of(1, 2, 4, 8, 145), "norm", [])) == []
    assert names(filter_updates(lengths_of(1, 2, 4, 8, 147), "norm", [])) == ["site-4"]


def test_steps_count_by_their_root() -> None:
    walked = lengths_of(1, 1, 1, 1, 12, steps=[1, 1, 1, 1, 9])
    assert names(filter_updates(walked, "norm", [])) == []
    assert names(filter_updates(walked, "norm", [], same_steps=True)) == ["site-4"]
    assert names(filter_updates(replace(walked, steps=torch.zeros(5, dtype=torch.long)), "norm", [])) == ["site-4"]


def test_running_statistics_are_no_part_of_a_length() -> None:
    """The last number is a statistic: large at an honest client, and no cover for a long step."""
    honest, long = lengths_of(1, 1, 1, 1, 1), lengths_of(1, 1, 1, 1, 8)
    for found in (honest, long):
        found.updates[:, 2] = 100.0
    honest.updates[4, 2] = 1000.0
    assert names(filter_updates(replace(honest, statistics=1), "norm", [])) == []
    assert names(filter_updates(replace(long, statistics=1), "norm", [])) == ["site-4"]


def test_few_clients_are_judged_by_earlier_rounds() -> None:
    three = lengths_of(1, 1, 100, t=1)
    assert names(filter_updates(three, "norm", [])) == []
    past = filter_updates(lengths_of(1, 1, 2), "norm", []).lengths
    assert names(filter_updates(three, "norm", [past])) == ["site-2"]
    unknown = torch.full((3,), math.nan, dtype=torch.float64)
    assert names(filter_updates(three, "norm", [past, unknown])) == ["site-2"]
    assert names(filter_updates(three, "norm", [unknown, unknown])) == []


def test_a_short_update_and_none_at_all_are_let_through() -> None:
    assert names(filter_updates(lengths_of(1, 1, 1, 1, 0), "norm", [])) == []
    assert names(filter_updates(lengths_of(0, 0, 0, 0, 0), "norm", [])) == []
    assert names(filter_updates(lengths_of(0, 0, 0, 0, 1), "norm", [])) == ["site-4"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_not_finite_is_always_set_aside(bad: float) -> None:
    for screen in ("finite", "norm"):
        found = filter_updates(lengths_of(1, 1, bad, 1, 1, 1), screen, [])
        assert names(found) == ["site-2"]
        assert bool(torch.isfinite(found.report.updates).all())


def test_nobody_left_is_a_divergence() -> None:
    with pytest.raises(DivergenceError, match=r"round 0: no update is finite .* client 'site-0', client 'site-1';"):
        filter_updates(lengths_of(math.nan, math.inf), "finite", [])


def test_unknown_screening_is_refused() -> None:
    with pytest.raises(InputError, match="unknown screening 'size'; choose finite or norm"):
        check_update_filter("size")
    with pytest.raises(InputError, match="choose finite or norm"):
        Algorithm(screen="all")  # type: ignore[arg-type]


def test_nothing_of_one_set_aside_is_left_in_the_report() -> None:
    """Four alike, one far too long, and one that was refused before."""
    updates = lengths_of(1, 1, 1, 1, 50).updates
    seen = replace(
        report([1] * 6, keys=[f"site-{k}" for k in range(6)], present=[True] * 5 + [False]),
        updates=updates,
        loss=torch.tensor([0.0, 1, 2, 3, 4, math.nan]),
        gradients=updates,
        outer_loss=7.0,
        per_client_outer_loss=10.0 ** torch.arange(5),
        outer_gradient=torch.ones(3, dtype=torch.float64),
        per_client_outer_gradients=updates,
        norms=updates.norm(dim=1),
        refused={"site-5": "has no arrays"},
    )
    found = filter_updates(seen, "norm", [])
    assert names(found) == ["site-4", "site-5"]
    left = found.report
    assert left.loss is not None and left.gradients is not None and left.outer_gradient is not None
    assert left.loss[:4].tolist() == [0, 1, 2, 3]
    assert left.loss[4].isnan()
    assert left.gradients.shape == (4, 3)
    assert left.outer_loss == 7 + 1111
    assert left.outer_gradient.tolist() == [1, 5, 1]
    assert left.per_client_outer_loss is None and left.per_client_outer_gradients is None
    assert left.norms is not None and left.norms.tolist() == [1, 1, 1, 1]
    assert left.steps.tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("participation_probability", [1.0, 0.6])
def test_lengths_measured_on_the_way_are_those_of_the_updates(participation_probability: float) -> None:
    """Under nova, whose updates are not what the clients walked, and where c is set aside as it diverges."""
    env = tiny(lr=1e3, participation_probability=participation_probability)
    data = env.load()
    x = data.x.clone() * 1e-4
    x[data.offsets[2] :] *= 1e30
    federation = SimulatedFederation(env, replace(data, x=x))
    start = federation.initial_model(RUN)
    reports = [federation.train(Algorithm(nova()).request(RUN, t, start)) for t in range(4)]
    assert any(found.refused for found in reports)
    for found in reports:
        assert (found.norms is None) == (not found.present.any())
        norms = [] if found.norms is None else found.norms.tolist()
        assert norms == pytest.approx(found.updates.norm(dim=1).tolist(), rel=1e-6)
        assert filter_updates(found, "finite", []).lengths.tolist() == pytest.approx(
            filter_updates(replace(found, norms=None), "finite", []).lengths.tolist(), nan_ok=True, rel=1e-6
        )


@given(LENGTHS, st.randoms())
def test_the_order_of_the_clients_does_not_matter(lengths: list[float], random: object) -> None:
    lengths = [*lengths, 1000 * max(lengths)]
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    listed = filter_updates(lengths_of(*lengths), "norm", [])
    relisted = filter_updates(lengths_of(*(lengths[k] for k in order)), "norm", [])
    expected = [lengths[int(name.removeprefix("site-"))] for name in names(listed)]
    assert sorted(expected) == sorted(lengths[order[int(name.removeprefix("site-"))]] for name in names(relisted))


@example([0.5, 0.1, 0.1, 0.1, 0.1], 0.25)
@given(LENGTHS, st.floats(1e-6, 1e6))
def test_only_factors_between_lengths_count(lengths: list[float], scale: float) -> None:
    lengths = [*lengths, 300.0]
    assert names(filter_updates(lengths_of(*lengths), "norm", [])) == names(
        filter_updates(lengths_of(*(scale * length for length in lengths)), "norm", [])
    )


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=9), st.floats(1e6, 1e30))
def test_alike_clients_stay_and_one_far_out_goes(lengths: list[float], far: float) -> None:
    """Within a factor of 4 of each other nobody is 5 times the median, and the spread is log 4 · 1.4826 at most."""
    assert names(filter_updates(lengths_of(*lengths, far), "norm", [])) == [f"site-{len(lengths)}"]
    assert names(filter_updates(lengths_of(*lengths), "norm", [])) == []


# --- in a round and in a run -------------------------------------------------------------------------------


@pytest.mark.parametrize(("absent", "moved"), [("keep", 0.8), ("drop", 1.0), ("remember", 1.0)])
def test_one_set_aside_counts_as_absent(absent: str, moved: float) -> None:
    """Every update is 1 but the last; under remember it is its update of the round before that counts."""
    algorithm = Algorithm(absent=absent, screen="norm")  # type: ignore[arg-type]
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    server = Server.start(torch.zeros(3, dtype=torch.float64), algorithm)
    past: list[Tensor] = []
    for t, last in enumerate((1.0, 500.0)):
        sifted = algorithm.filter_updates(lengths_of(1, 1, 1, 1, last, t=t), past)
        past.append(sifted.lengths)
        before = server.model
        server, put_together = aggregate(server, sifted.report, weights, algorithm)
    assert float(server.model[1] - before[1]) == pytest.approx(moved)
    assert put_together.present.tolist() == [True] * 4 + [False]


def test_a_long_update_is_not_remembered() -> None:
    algorithm = Algorithm(absent="remember", screen="norm")
    server = Server.start(torch.zeros(3, dtype=torch.float64), algorithm)
    sifted = algorithm.filter_updates(lengths_of(1, 1, 1, 1, 500), [])
    server, _ = aggregate(server, sifted.report, torch.full((5,), 0.2, dtype=torch.float64), algorithm)
    assert sorted(server.memory) == [0, 1, 2, 3]


SITES = dict.fromkeys("abcdef", 9)


def test_a_run_names_who_was_set_aside_and_goes_as_if_they_were_away() -> None:
    env = tiny(SITES, epochs=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300  # the units of f are not those of the others
    result = run_rounds(simulated(env), size(), 3, algorithm=Algorithm(screen="norm", absent="drop"), run=RUN)
    assert {(entry.round, entry.client) for entry in result.rejected} == {(t, "f") for t in range(3)}
    assert result.warnings[0].startswith("client f was rejected in rounds 1, 2 and 3 of 3: it sends an update ")
    away = tiny(SITES, epochs=1, participation_probability={**dict.fromkeys("abcde", 1.0), "f": 0.0})
    expected = run_rounds(simulated(away), size(), 3, algorithm=Algorithm(absent="drop"), run=RUN)
    assert torch.equal(result.present, expected.present)
    torch.testing.assert_close(result.model, expected.model)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_nothing_of_an_update_too_large_to_be_measured_is_learned_from(adjoint: AdjointKind) -> None:
    """Its entries are finite, its length is not: single precision has no squares of 1e25."""
    env = tiny(rounds=2, lr=0.01, model=())
    data = env.load()
    data.x[data.offsets[1] : data.offsets[2]] *= 1e22
    federation = SimulatedFederation(env, data)
    start, theta = federation.initial_model(RUN), torch.ones(2, 3, dtype=torch.float64)
    found, screened = (
        unfold(federation, theta, Algorithm(screen=screen), OuterLoss("path"), adjoint, run=RUN, model=start)
        for screen in ("finite", "norm")
    )
    assert {entry.client for entry in found.rejected} == {"b"}
    torch.testing.assert_close(found.gradient, screened.gradient)


def test_honest_clients_are_left_alone() -> None:
    env = tiny(dict(zip("abcdef", (3, 6, 9, 12, 30, 60), strict=True)), epochs=2)
    for algorithm in (Algorithm(screen="norm"), Algorithm(nova(), screen="norm")):
        for rule in (size(), fedadp()):
            assert run_rounds(simulated(env), rule, 3, algorithm=algorithm, run=RUN).rejected == ()


def test_how_long_honest_updates_get() -> None:
    """Where one site has most of the data, under nova: almost 4 times the median."""
    env = environment("digits-quantity-skew")
    federation, algorithm = SimulatedFederation(env), Algorithm(nova(), screen="norm")
    server = Server.start(federation.initial_model(RUN), algorithm)
    longest = 0.0
    for t in range(env.rounds):
        sifted = algorithm.filter_updates(federation.train(algorithm.request(RUN, t, server.model)), [])
        assert sifted.rejected == ()
        longest = max(longest, float((sifted.lengths.max() - sifted.lengths.quantile(0.5)).exp()))
        server, _ = aggregate(server, sifted.report, size()(sifted.report, None)[0], algorithm)
    assert 3.5 < longest < 4
