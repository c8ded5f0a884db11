"""Whole runs: against plain PyTorch, against each other, and what randomness may and may not change."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.local import accumulated, momentum, nova, prox, sgd
from fedunfold.rules import (
    Rule,
    afl,
    dr,
    fedadp,
    fedawa,
    feddisco,
    fedfa,
    fixed,
    online_hypergradient,
    q_fedavg,
    size,
    uniform,
)
from fedunfold.server import adam
from fedunfold.training.loop import run_rounds
from tests.support.federations import (
    RUN,
    SIZES,
    ContractOnly,
    Plain,
    assert_same,
    convolution,
    final_model,
    mlp,
    run_one,
    simulated,
    tiny,
    train,
)

RHO, MU = 0.6, 0.5
RULES = [
    size(),
    dr(),
    dr(loss="start"),
    fedadp(),
    fedfa(),
    feddisco(),
    q_fedavg(),
    afl(),
    fedawa(),
    online_hypergradient(),
]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())


# --- against torch.optim.SGD -------------------------------------------------------------------------------


@pytest.mark.parametrize("participation_probability", [1.0, 0.6])
@pytest.mark.parametrize(
    ("optimizer", "local"),
    [(sgd(), {}), (prox(MU), {"mu": MU}), (momentum(RHO), {"rho": RHO})],
    ids=["sgd", "prox", "momentum"],
)
def test_a_run_is_the_plain_loop(
    optimizer: LocalOptimizer, local: dict[str, float], participation_probability: float
) -> None:
    env = tiny(participation_probability=participation_probability)
    start = simulated(env).initial_model(RUN)
    expected = Plain(env, mlp(env)).averaged(start, env.rounds, **local)
    assert distance(expected, start) > 0.01
    assert_same(final_model(env, optimizer), expected)


@pytest.mark.parametrize("hidden", [(), (4, 3)])
def test_other_depths(hidden: tuple[int, ...]) -> None:
    env = tiny(model=hidden)
    expected = Plain(env, mlp(env)).averaged(simulated(env).initial_model(RUN), env.rounds)
    assert_same(final_model(env, sgd()), expected)


def test_a_convolution_is_the_plain_loop() -> None:
    env = tiny(shape=(1, 4, 4))
    federation = simulated(env, convolution)
    assert federation.kernel == "ModuleKernel"
    expected = Plain(env, convolution).averaged(federation.initial_model(RUN), env.rounds)
    assert_same(run_one(federation, size(), env.rounds).model, expected)


@pytest.mark.parametrize("shape", [(5,), (1, 4, 4)])
def test_single_precision(shape: tuple[int, ...]) -> None:
    env = tiny(shape=shape)
    build = convolution if len(shape) > 1 else mlp(env)
    federation = simulated(env, build, torch.float32)
    start = federation.initial_model(RUN)
    result = run_one(federation, size(), env.rounds)
    assert result.model.dtype == torch.float32
    assert_same(result.model, Plain(env, build, torch.float32).averaged(start, env.rounds), 1e-5)


def test_nova_is_the_plain_loop_with_scaled_steps() -> None:
    env = tiny()
    plain = Plain(env, mlp(env))
    expected = simulated(env).initial_model(RUN)
    for t in range(env.rounds):
        steps = plain.steps(t)
        assert len(set(steps)) == 3
        effective = sum(share * n for share, n in zip(plain.shares, steps, strict=True))
        models = [plain.train(expected, t, k, scale=effective / steps[k]).model for k in range(3)]
        expected = torch.stack([s * w for s, w in zip(plain.shares, models, strict=True)]).sum(0)
    assert_same(final_model(env, nova()), expected)


# --- special cases of one another --------------------------------------------------------------------------


def test_prox_without_a_pull_is_sgd() -> None:
    env = tiny(participation_probability=0.7)
    assert torch.equal(final_model(env, prox(0.0)), final_model(env, sgd()))


def test_nova_with_equal_steps_is_sgd() -> None:
    env = tiny(dict.fromkeys("abc", 6), epochs=2)
    assert_same(final_model(env, nova()), final_model(env, sgd()), 1e-12)


def test_nova_with_unequal_steps_or_absences_is_not_sgd() -> None:
    for env in (tiny(), tiny(dict.fromkeys("abc", 6), epochs=2, participation_probability=0.5)):
        assert distance(final_model(env, nova()), final_model(env, sgd())) > 1e-3


def norm(base: LocalOptimizer, steps: int, lr: float) -> float:
    """‖a_k‖₁, from the closed forms of the general formulation."""
    remaining = range(1, steps + 1)
    if base.name == "momentum":
        return sum((1 - RHO**n) / (1 - RHO) for n in remaining)
    return sum((1 - lr * (base.fused_mu or 0)) ** (n - 1) for n in remaining)


@pytest.mark.parametrize("base", [sgd(), prox(MU), momentum(RHO)], ids=lambda base: base.name)
def test_the_accumulated_form_covers_its_base(base: LocalOptimizer) -> None:
    """Θ̃_k = (N_k/N)‖a_k‖₁/τ_eff gives FedAvg, FedProx and heavy ball under size weights."""
    env = tiny()
    plain = Plain(env, mlp(env))
    rows = []
    for t in range(env.rounds):
        parts = [s * norm(base, n, env.lr) for s, n in zip(plain.shares, plain.steps(t), strict=True)]
        rows.append([part / sum(parts) for part in parts])
    general = final_model(env, accumulated(base), fixed(rows))
    assert_same(general, final_model(env, base))
    assert distance(final_model(env, accumulated(base)), general) > 1e-3  # size weights are another rule


def test_both_forms_of_nova_agree_for_single_steps_only() -> None:
    """With an absence among single steps both scale by τ_eff < 1; later gradients are met elsewhere."""
    single = tiny(batch_size=9, epochs=1, participation_probability=0.6)
    assert not all(all(Plain(single, mlp(single)).participated(t)) for t in range(3))
    assert_same(final_model(single, nova()), final_model(single, accumulated(sgd())), 1e-12)
    assert distance(final_model(single, nova()), final_model(single, sgd())) > 1e-3
    several = tiny()
    assert distance(final_model(several, nova()), final_model(several, accumulated(sgd()))) > 1e-3


# --- absent clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_absent_clients_in_a_run(absent: Absent) -> None:
    """The three semantics written out, over rounds of which some lack clients."""
    env = tiny(participation_probability=0.5, rounds=5, seed=109)
    plain = Plain(env, mlp(env))
    assert [sum(plain.participated(t)) for t in range(5)] == [1, 0, 1, 2, 2]
    w = simulated(env).initial_model(RUN)
    last = [torch.zeros_like(w)] * 3
    for t in range(env.rounds):
        here = plain.participated(t)
        fresh = [plain.train(w, t, k).model - w if here[k] else torch.zeros_like(w) for k in range(3)]
        last = [fresh[k] if here[k] else last[k] for k in range(3)]
        total = sum(s for s, trained in zip(plain.shares, here, strict=True) if trained) or 1.0
        moves = last if absent == "remember" else fresh
        scale = total if absent == "drop" else 1.0
        w = w + torch.stack([s * m / scale for s, m in zip(plain.shares, moves, strict=True)]).sum(0)
    assert_same(final_model(env, sgd(), absent=absent), w)


def test_nobody_ever_participates() -> None:
    env = tiny(participation_probability=0.0)
    for optimizer in (sgd(), nova(), accumulated(prox(MU)), momentum(RHO)):
        for rule in RULES:
            result = run_one(simulated(env), rule, 2, algorithm=Algorithm(optimizer))
            assert torch.equal(result.model, simulated(env).initial_model(RUN))
            assert not result.participated.any()
            assert result.weights.sum(1).tolist() == pytest.approx([1, 1])


# --- what a run gives back ---------------------------------------------------------------------------------


def test_results_and_callback() -> None:
    env = tiny(participation_probability=0.6)
    seen: list[tuple[int, Evaluation]] = []
    federation = simulated(env)
    (result,) = run_rounds(federation, size(), env.rounds, on_round=lambda t, tests: seen.append((t, tests[0])))
    plain = Plain(env, mlp(env))
    assert result.participated.tolist() == [plain.participated(t) for t in range(3)]
    assert torch.equal(result.weights, torch.tensor([plain.shares] * 3, dtype=torch.float64))
    assert [t for t, _ in seen] == [0, 1, 2]
    assert tuple(test for _, test in seen) == result.evaluations
    assert result.scores == [test.score for _, test in seen]

    data = env.load()
    logits = plain.module(result.model)(data.x_test.double())
    right = logits.argmax(1) == data.y_test
    last = result.evaluations[-1]
    assert last.score == pytest.approx(right.double().mean().item())
    assert last.loss == pytest.approx(nn.functional.cross_entropy(logits, data.y_test).item())
    per_class = [right[data.y_test == c].double().mean().item() for c in range(3)]
    assert last.class_accuracy.tolist() == pytest.approx(per_class)


@pytest.mark.parametrize("rounds", [0, -1])
def test_a_run_needs_rounds(rounds: int) -> None:
    with pytest.raises(InputError, match=f"at least 1 round, not {rounds}"):
        run_rounds(simulated(tiny()), size(), rounds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"absent": "forget"}, "'forget'; choose keep, drop or remember"),
        ({"absent_loss": "no"}, "absent clients' losses 'no'; choose evaluate or skip"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Algorithm(**settings)


def test_divergence_names_round_and_client() -> None:
    env = tiny(lr=1e38)
    with pytest.raises(DivergenceError, match=r"round 0: client 'a' .* learning rate \(now 1e\+38\)") as caught:
        run_rounds(simulated(env, dtype=torch.float32), size(), env.rounds)
    assert "\n" not in str(caught.value)


def test_a_client_that_diverges_alone_is_rejected() -> None:
    """a is absent, and only c makes the second step that can overflow here: b continues without it."""
    participation_probability = {"a": 0.0, "b": 1.0, "c": 1.0}
    env = tiny({"a": 9, "b": 2, "c": 9}, epochs=1, lr=1e19, participation_probability=participation_probability)
    result = run_one(simulated(env, dtype=torch.float32), size(), 1)
    assert result.participated.tolist() == [[False, True, False]]
    assert [(entry.round, entry.client) for entry in result.rejected] == [(0, "c")]
    assert result.warnings == ("client c was rejected in round 1 of 1: it went non-finite during local training.",)


@pytest.mark.parametrize("outer", ["path", "balanced"])
@pytest.mark.parametrize("optimizer", [sgd(), prox(0.1)], ids=["sgd", "prox"])
def test_nothing_is_left_of_a_client_that_diverges(optimizer: LocalOptimizer, outer: str) -> None:
    """Sums of gradients that training adds up itself, and those that an update carries: as if c had been absent."""
    wide = {"a": 9, "b": 2, "c": 9}
    env, alone = (
        tiny(wide, epochs=1, lr=1e19, participation_probability={"a": 0.0, "b": 1.0, "c": present})
        for present in (1.0, 0.0)
    )
    more: dict[str, Any] = {"optimizer": optimizer, "outer": OUTER_LOSSES.make(outer), "absent_loss": "skip"}
    more |= {"path_gradient": True}
    found, expected = (train(simulated(e, dtype=torch.float32), "gradients", **more) for e in (env, alone))
    assert list(found.rejected) == ["c"]
    assert found.participated.tolist() == expected.participated.tolist() == [False, True, False]
    torch.testing.assert_close(found.updates.rows, expected.updates.rows)
    torch.testing.assert_close(found.metric("gradients"), expected.metric("gradients"))
    torch.testing.assert_close(found.outer.gradient, expected.outer.gradient)
    assert found.outer.loss == pytest.approx(expected.outer.loss)


def test_divergence_where_nobody_is_left() -> None:
    """c is rejected in the first round, and from where that leads b cannot continue either."""
    env = tiny({"a": 9, "b": 2, "c": 9}, epochs=1, lr=1e38, participation_probability={"a": 0.0, "b": 1.0, "c": 1.0})
    with pytest.raises(DivergenceError, match="client 'b'"):
        run_rounds(simulated(env, dtype=torch.float32), size(), env.rounds)


def test_divergence_at_the_server() -> None:
    env = tiny()
    algorithm = Algorithm(server=adam(1e38))
    with pytest.raises(DivergenceError, match="round 0: the aggregated model is not finite"):
        run_rounds(simulated(env, dtype=torch.float32), size(), env.rounds, algorithm=algorithm)


# --- randomness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@settings(max_examples=8)
@given(order=st.permutations(list(SIZES)), seed=st.integers(0, 50))
def test_listing_the_clients_otherwise_only_reorders(rule: Any, order: list[str], seed: int) -> None:
    results = []
    for keys in (list(SIZES), order):
        env = tiny({key: SIZES[key] for key in keys}, seed=seed, participation_probability=0.8)
        results.append(run_one(simulated(env), rule, 2, algorithm=Algorithm(nova())))
    listed, relisted = results
    columns = [list(SIZES).index(key) for key in order]
    assert_same(relisted.model, listed.model, 1e-9)
    assert_same(relisted.weights, listed.weights[:, columns], 1e-9)
    assert torch.equal(relisted.participated, listed.participated[:, columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_the_seed_and_the_run_decide_everything(dtype: torch.dtype, seed: int) -> None:
    def model(seed: int, run: str) -> Tensor:
        env = tiny(seed=seed, participation_probability=0.8)
        return run_one(simulated(env, dtype=dtype), dr(), 2, run=run).model

    first = model(seed, "trial-0")
    torch.rand(3)  # the global generator plays no part
    assert torch.equal(model(seed, "trial-0"), first)
    assert distance(model(seed + 1, "trial-0"), first) > 1e-3
    assert distance(model(seed, "trial-1"), first) > 1e-3


def test_a_run_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    run_rounds(simulated(tiny()), uniform(), 1)
    assert torch.equal(torch.rand(1), expected)


def test_rules_see_what_they_need_in_every_round() -> None:
    """FedFa's weights over a run, from accuracies of plainly trained models."""
    env = tiny(rounds=2)
    plain = Plain(env, mlp(env))
    result = run_one(simulated(env), fedfa(gamma=1.0), 2)
    w = simulated(env).initial_model(RUN)
    for t in range(2):
        models = [plain.train(w, t, k).model for k in range(3)]
        accuracies = []
        for k, model in enumerate(models):
            x, y = plain.client(k)
            accuracies.append((plain.module(model)(x).argmax(1) == y).double().mean().item())
        information = [-math.log2(a / sum(accuracies)) for a in accuracies]
        row = [part / sum(information) for part in information]
        assert result.weights[t].tolist() == pytest.approx(row)
        w = torch.stack([theta * model for theta, model in zip(row, models, strict=True)]).sum(0)
    assert_same(result.model, w)


def test_step_sizes_scale_the_direction() -> None:
    """One round at a time by hand; rounds beyond the last size repeat it."""
    env = tiny(rounds=4)
    sizes = (0.5, 2.0, 1.5)
    scaled = run_one(simulated(env), size(), 4, algorithm=Algorithm(step_sizes=sizes))
    plain = Plain(env, mlp(env))
    w = simulated(env).initial_model(RUN)
    for t, by in enumerate((*sizes, sizes[-1])):
        models = [plain.train(w, t, k).model for k in range(3)]
        average = torch.stack([share * model for share, model in zip(plain.shares, models, strict=True)]).sum(0)
        w = w + by * (average - w)
    torch.testing.assert_close(scaled.model, w)


@pytest.mark.parametrize("wrong", [(-0.1,), (1.0, float("nan")), (float("inf"),), ("1",)])
def test_step_sizes_are_finite_and_not_negative(wrong: Any) -> None:
    with pytest.raises(InputError, match="step size of round"):
        Algorithm(step_sizes=wrong)


# --- several runs at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [size(), fedadp(), fedfa()], ids=["size", "fedadp", "fedfa"])
def test_batched_runs_are_runs_apart(rule: Rule) -> None:
    env = tiny(participation_probability=0.6)
    names = ["trial-0", "trial-1", "trial-2"]
    seen: list[tuple[int, int]] = []
    for federation in (simulated(env), ContractOnly(simulated(env))):
        together = run_rounds(
            federation, rule, env.rounds, names, on_round=lambda t, tests: seen.append((t, len(tests)))
        )
        for name, found in zip(names, together, strict=True):
            alone = run_one(simulated(env), rule, env.rounds, run=name)
            assert torch.equal(found.model, alone.model)
            assert torch.equal(found.weights, alone.weights)
            assert found.scores == alone.scores
    assert seen == 2 * [(t, 3) for t in range(env.rounds)]


# --- stopping early ----------------------------------------------------------------------------------------


def test_a_callback_stops_a_run_early() -> None:
    env = tiny(rounds=5)
    early = run_rounds(simulated(env), size(), 5, ["trial-0", "trial-1"], on_round=lambda t, tests: t == 1)
    for name, result in zip(("trial-0", "trial-1"), early, strict=True):
        assert len(result.evaluations) == len(result.weights) == len(result.participated) == 2
        assert torch.equal(result.model, run_one(simulated(env), size(), 2, run=name).model)
