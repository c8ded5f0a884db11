"""Who is rejected, by hand and for all inputs, and that nothing of them is left."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.aggregation.screening import FilterResult, filter_updates
from fedunfold.aggregation.server_round import ServerState
from fedunfold.config import environment
from fedunfold.core.algorithm import Absent, Algorithm, UpdateFilter
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.messages import ClientMetrics, ClientUpdates, OpenUpdates, OuterTerms
from fedunfold.core.outcomes import RejectedUpdate
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import nova
from fedunfold.rules import fedadp, size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from tests.support.federations import RUN, simulated, tiny
from tests.support.reports import aggregate_one, report, weigh

NORMS = st.lists(st.floats(0.1, 10.0), min_size=5, max_size=9)


def norms_of(*norms: float, steps: list[int] | None = None, t: int = 0) -> ClientUpdates:
    """Clients with updates of these norms along one axis; all with one step unless said otherwise."""
    updates = torch.zeros(len(norms), 3, dtype=torch.float64)
    updates[:, 1] = torch.tensor(norms, dtype=torch.float64)
    ids = [f"site-{k}" for k in range(len(norms))]
    found = report([1] * len(norms), round=t, client_ids=ids, updates=updates)
    return replace(found, num_steps=torch.tensor(steps or [1] * len(norms)))


def names(filtered: FilterResult) -> list[str]:
    return [entry.client for entry in filtered.rejected]


def test_five_times_the_median_is_the_least_that_is_too_large() -> None:
    assert names(filter_updates(norms_of(1, 1, 1, 1, 4.9), "norm", [])) == []
    found = filter_updates(norms_of(1, 1, 1, 1, 5.2), "norm", [])
    reason = "sends an update whose norm is 5.2 times the median, of 5 times at most"
    assert found.rejected == (RejectedUpdate(0, "site-4", reason),)
    assert found.report.participated.tolist() == [True] * 4 + [False]
    assert found.report.updates.rows.shape == (4, 3)
    assert found.log_norms[:4].tolist() == [0, 0, 0, 0]
    assert found.log_norms[4].isnan()


def test_norms_of_accepted_updates_come_along() -> None:
    """For the server's optimiser, also where the engine has measured none."""
    found = filter_updates(norms_of(1, 2, math.nan), "finite", []).report.updates
    assert isinstance(found, OpenUpdates)
    assert found.norms is not None and found.norms.tolist() == [1, 2]


def test_unlike_clients_widen_the_range() -> None:
    """x = log(1, 2, 4, 8, 64): m = log 4, |x − m| = log(4, 2, 1, 2, 16), s = 1.4826 log 2, and 4 · 2^5.19 = 146."""
    assert names(filter_updates(norms_of(1, 2, 4, 8, 64), "norm", [])) == []
    assert names(filter_updates(norms_of(1, 2, 4, 8, 145), "norm", [])) == []
    assert names(filter_updates(norms_of(1, 2, 4, 8, 147), "norm", [])) == ["site-4"]


def test_steps_count_by_their_root() -> None:
    trained = norms_of(1, 1, 1, 1, 12, steps=[1, 1, 1, 1, 9])
    assert names(filter_updates(trained, "norm", [])) == []
    assert names(filter_updates(trained, "norm", [], normalized=True)) == ["site-4"]
    assert names(filter_updates(replace(trained, num_steps=torch.zeros(5, dtype=torch.long)), "norm", [])) == ["site-4"]


def test_buffers_are_no_part_of_a_norm() -> None:
    """The last number is one of a buffer: large at an honest client, and no cover for a large step."""
    honest, large = norms_of(1, 1, 1, 1, 1), norms_of(1, 1, 1, 1, 8)
    for found in (honest, large):
        found.updates.rows[:, 2] = 100.0
    honest.updates.rows[4, 2] = 1000.0
    layout = ParamLayout(("w",), (torch.Size([2]),), ("mean",), (torch.Size([1]),))
    assert names(filter_updates(replace(honest, layout=layout), "norm", [])) == []
    assert names(filter_updates(replace(large, layout=layout), "norm", [])) == ["site-4"]


def test_few_clients_are_judged_by_earlier_rounds() -> None:
    three = norms_of(1, 1, 100, t=1)
    assert names(filter_updates(three, "norm", [])) == []
    past = filter_updates(norms_of(1, 1, 2), "norm", []).log_norms
    assert names(filter_updates(three, "norm", [past])) == ["site-2"]
    unknown = torch.full((3,), math.nan, dtype=torch.float64)
    assert names(filter_updates(three, "norm", [past, unknown])) == ["site-2"]
    assert names(filter_updates(three, "norm", [unknown, unknown])) == []


def test_a_small_update_and_none_at_all_are_accepted() -> None:
    assert names(filter_updates(norms_of(1, 1, 1, 1, 0), "norm", [])) == []
    assert names(filter_updates(norms_of(0, 0, 0, 0, 0), "norm", [])) == []
    assert names(filter_updates(norms_of(0, 0, 0, 0, 1), "norm", [])) == ["site-4"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_not_finite_is_always_rejected(bad: float) -> None:
    kinds: list[UpdateFilter] = ["finite", "norm"]
    for kind in kinds:
        found = filter_updates(norms_of(1, 1, bad, 1, 1, 1), kind, [])
        assert names(found) == ["site-2"]
        assert bool(torch.isfinite(found.report.updates.rows).all())


def test_nobody_left_is_a_divergence() -> None:
    with pytest.raises(DivergenceError, match=r"round 0: no update is finite .* client 'site-0', client 'site-1';"):
        filter_updates(norms_of(math.nan, math.inf), "finite", [])


def test_unknown_filters_are_refused() -> None:
    with pytest.raises(InputError, match="unknown filter of updates 'size'; choose finite or norm"):
        Algorithm(filter="size")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="choose finite or norm"):
        Algorithm(filter="all")  # type: ignore[arg-type]


def test_nothing_of_a_rejected_client_is_left_in_the_report() -> None:
    """Four alike, one far too large, and one that was refused before."""
    rows = norms_of(1, 1, 1, 1, 50).updates.rows
    seen = replace(
        report([1] * 6, client_ids=[f"site-{k}" for k in range(6)], participated=[True] * 5 + [False]),
        updates=OpenUpdates(torch.arange(5), rows, rows.norm(dim=1)),
        metrics=ClientMetrics(loss=torch.tensor([0.0, 1, 2, 3, 4, math.nan]), gradients=rows),
        outer=OuterTerms(
            loss=7.0,
            gradient=torch.ones(3, dtype=torch.float64),
            client_losses=10.0 ** torch.arange(5),
            client_gradients=rows,
        ),
        rejected={"site-5": "has no arrays"},
    )
    found = filter_updates(seen, "norm", [])
    assert names(found) == ["site-4", "site-5"]
    left = found.report
    loss, gradients, gradient = left.metrics.loss, left.metrics.gradients, left.outer.gradient
    assert loss is not None and gradients is not None and gradient is not None
    assert loss[:4].tolist() == [0, 1, 2, 3]
    assert loss[4].isnan()
    assert gradients.shape == (4, 3)
    assert left.outer.loss == 7 + 1111
    assert gradient.tolist() == [1, 5, 1]
    assert left.outer.client_losses is None and left.outer.client_gradients is None
    assert isinstance(left.updates, OpenUpdates)
    assert left.updates.norms is not None and left.updates.norms.tolist() == [1, 1, 1, 1]
    assert left.num_steps.tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("participation_probability", [1.0, 0.6])
def test_norms_measured_by_the_engine_are_those_of_the_updates(participation_probability: float) -> None:
    """Under nova, whose updates are not what the clients' steps add up to, and where c is rejected as it diverges."""
    env = tiny(lr=1e3, participation_probability=participation_probability)
    data = env.load()
    x = data.x.clone() * 1e-4
    x[data.offsets[2] :] *= 1e30
    federation = SimulatedFederation(env, replace(data, inputs=x))
    start = federation.initial_model(RUN)
    reports = [federation.train([Algorithm(nova()).request(RUN, t, start)])[0] for t in range(4)]
    assert any(found.rejected for found in reports)
    for found in reports:
        updates = found.updates
        assert isinstance(updates, OpenUpdates)
        assert (updates.norms is None) == (not found.participated.any())
        norms = [] if updates.norms is None else updates.norms.tolist()
        assert norms == pytest.approx(updates.rows.norm(dim=1).tolist(), rel=1e-6)
        unmeasured = replace(found, updates=replace(updates, norms=None))
        assert filter_updates(found, "finite", []).log_norms.tolist() == pytest.approx(
            filter_updates(unmeasured, "finite", []).log_norms.tolist(), nan_ok=True, rel=1e-6
        )


@given(NORMS, st.randoms())
def test_the_order_of_the_clients_does_not_matter(norms: list[float], random: object) -> None:
    norms = [*norms, 1000 * max(norms)]
    order = list(range(len(norms)))
    random.shuffle(order)  # type: ignore[attr-defined]
    listed = filter_updates(norms_of(*norms), "norm", [])
    relisted = filter_updates(norms_of(*(norms[k] for k in order)), "norm", [])
    expected = [norms[int(name.removeprefix("site-"))] for name in names(listed)]
    assert sorted(expected) == sorted(norms[order[int(name.removeprefix("site-"))]] for name in names(relisted))


@example([0.5, 0.1, 0.1, 0.1, 0.1], 0.25)
@given(NORMS, st.floats(1e-6, 1e6))
def test_only_factors_between_norms_count(norms: list[float], scale: float) -> None:
    norms = [*norms, 300.0]
    assert names(filter_updates(norms_of(*norms), "norm", [])) == names(
        filter_updates(norms_of(*(scale * length for length in norms)), "norm", [])
    )


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=9), st.floats(1e6, 1e30))
def test_alike_clients_stay_and_one_far_out_goes(norms: list[float], far: float) -> None:
    """Within a factor of 4 of each other nobody is 5 times the median, and the spread is log 4 · 1.4826 at most."""
    assert names(filter_updates(norms_of(*norms, far), "norm", [])) == [f"site-{len(norms)}"]
    assert names(filter_updates(norms_of(*norms), "norm", [])) == []


# --- in a round and in a run -------------------------------------------------------------------------------


@pytest.mark.parametrize(("absent", "moved"), [("keep", 0.8), ("drop", 1.0), ("remember", 1.0)])
def test_a_rejected_client_counts_as_absent(absent: Absent, moved: float) -> None:
    """Every update is 1 but the last; under remember it is its update of the round before that counts."""
    algorithm = Algorithm(absent=absent, filter="norm")
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    server = ServerState.start(torch.zeros(3, dtype=torch.float64), algorithm)
    past: list[Tensor] = []
    for t, last in enumerate((1.0, 500.0)):
        filtered = filter_updates(norms_of(1, 1, 1, 1, last, t=t), "norm", past)
        past.append(filtered.log_norms)
        before = server.model
        server, aggregated = aggregate_one(server, filtered.report, weights, algorithm)
    assert float(server.model[1] - before[1]) == pytest.approx(moved)
    assert aggregated.participated.tolist() == [True] * 4 + [False]


def test_a_large_update_is_not_remembered() -> None:
    algorithm = Algorithm(absent="remember", filter="norm")
    server = ServerState.start(torch.zeros(3, dtype=torch.float64), algorithm)
    filtered = filter_updates(norms_of(1, 1, 1, 1, 500), "norm", [])
    server, _ = aggregate_one(server, filtered.report, torch.full((5,), 0.2, dtype=torch.float64), algorithm)
    assert sorted(server.memory) == [0, 1, 2, 3]


SITES = dict.fromkeys("abcdef", 9)


def test_a_run_names_who_was_rejected_and_goes_as_if_they_were_absent() -> None:
    env = tiny(SITES, epochs=1)
    data = env.load()
    data.x[data.offsets[5] :] *= 300  # the units of f are not those of the others
    (result,) = run_rounds(simulated(env), size(), 3, algorithm=Algorithm(filter="norm", absent="drop"))
    assert {(entry.round, entry.client) for entry in result.rejected} == {(t, "f") for t in range(3)}
    assert result.warnings[0].startswith("client f was rejected in rounds 1, 2 and 3 of 3: it sends an update ")
    absent = tiny(SITES, epochs=1, participation_probability={**dict.fromkeys("abcde", 1.0), "f": 0.0})
    (expected,) = run_rounds(simulated(absent), size(), 3, algorithm=Algorithm(absent="drop"))
    assert torch.equal(result.participated, expected.participated)
    torch.testing.assert_close(result.model, expected.model)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_nothing_of_an_update_too_large_to_be_measured_is_learned_from(adjoint: AdjointKind) -> None:
    """Its entries are finite, its norm is not: single precision has no squares of 1e25."""
    env = tiny(rounds=2, lr=0.01, model=())
    data = env.load()
    data.x[data.offsets[1] : data.offsets[2]] *= 1e22
    federation = SimulatedFederation(env, data)
    start, theta = federation.initial_model(RUN), torch.ones(2, 3, dtype=torch.float64)
    kinds: list[UpdateFilter] = ["finite", "norm"]
    found, screened = (
        unroll_and_grad(
            *(federation, theta, Algorithm(filter=kind), OUTER_LOSSES.make("path"), adjoint), runs=[RUN], models=[start]
        )[0]
        for kind in kinds
    )
    assert {entry.client for entry in found.rejected} == {"b"}
    torch.testing.assert_close(found.gradient, screened.gradient)


def test_honest_clients_are_left_alone() -> None:
    env = tiny(dict(zip("abcdef", (3, 6, 9, 12, 30, 60), strict=True)), epochs=2)
    for algorithm in (Algorithm(filter="norm"), Algorithm(nova(), filter="norm")):
        for rule in (size(), fedadp()):
            assert run_rounds(simulated(env), rule, 3, algorithm=algorithm)[0].rejected == ()


def test_how_large_honest_updates_get() -> None:
    """Where one site has most of the data, under nova: almost 4 times the median."""
    env = environment("digits-quantity-skew")
    federation, algorithm = SimulatedFederation(env), Algorithm(nova(), filter="norm")
    server = ServerState.start(federation.initial_model(RUN), algorithm)
    largest = 0.0
    for t in range(env.rounds):
        (updates,) = federation.train([algorithm.request(RUN, t, server.model)])
        filtered = filter_updates(updates, "norm", [], normalized=algorithm.local.normalized)
        assert filtered.rejected == ()
        largest = max(largest, float((filtered.log_norms.max() - filtered.log_norms.quantile(0.5)).exp()))
        server, _ = aggregate_one(server, filtered.report, weigh(size(), filtered.report)[0], algorithm)
    assert 3.5 < largest < 4
