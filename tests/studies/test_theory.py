"""The convergence bound, by hand on small cases."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.parts import LocalOptimizer
from fedunfold.local import accumulated, momentum, nova, prox, sgd
from fedunfold.studies.theory.analysis import analyse, analyse_learned
from fedunfold.studies.theory.formulas import local_factors, recast_weights, weight_variances
from fedunfold.studies.theory.quantities import Constants
from fedunfold.unfolding import Learning, learn
from tests.support.federations import simulated, tiny

SIZES = np.array([30, 10])
STEPS = np.array([[2, 4], [2, 4]])
WEIGHTS = np.array([[0.75, 0.25], [0.25, 0.75]])
ALL = Constants(L=2, sigma=3, G=4, kappa=5, beta=1, gap=6)


# ---- by hand -------------------------------------------------------------------------------------------


def test_plain_steps() -> None:
    """a = 1: ‖a‖₁ = ‖a‖² = τ_k, so τ_eff = ¾·2 + ¼·4."""
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, sgd())
    assert seen.objective == (0.5, 0.5)
    assert seen.variances == (0.0625, 0.0625)
    assert seen.mean_variance == 0.0625
    assert seen.variance_scale == pytest.approx(2**-0.5)
    assert seen.mean_steps == 3
    assert seen.rate_lr == pytest.approx((2 / (3 * 2)) ** 0.5)
    assert seen.effective_steps == (2.5, 2.5)
    # Σ_k Θ_k²/τ_k is 0.296875 in the first round and 0.171875 in the second; K/T = 1.
    assert seen.a_tilde == pytest.approx(2.5 * 0.46875)
    assert seen.a_tilde_published == pytest.approx(0.46875)
    assert seen.b_tilde_published == pytest.approx((0.5 * (2 - 1), 0.5 * (4 - 1)))
    assert seen.b_tilde == pytest.approx(2)
    assert seen.c_tilde == pytest.approx(4 * (4 - 1))
    assert seen.d_per_l2 == pytest.approx(4 * 0.01 * 12)
    assert seen.d is None


def test_steps_scaled_in_the_loop() -> None:
    """nova: a = c = 2.5/2 twice and 2.5/4 four times, so that ‖a‖₁ = τ_eff for both."""
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, nova())
    assert seen.effective_steps == (2.5, 2.5)
    assert seen.a_tilde == pytest.approx(2.5 * 0.46875)
    assert seen.b_tilde == pytest.approx(0.5 * 1.25**2 + 0.5 * 3 * 0.625**2)
    assert seen.c_tilde == pytest.approx(2.5 * (2.5 - 0.625))
    assert seen.conditions[-1].holds


def test_shrinking_and_growing_factors() -> None:
    shrunk = local_factors(STEPS, SIZES, 0.1, prox(5))
    assert shrunk.l1[0] == pytest.approx([0.5 + 1, 0.125 + 0.25 + 0.5 + 1])
    assert shrunk.squared[0] == pytest.approx([1.25, 1.328125])
    assert shrunk.last[0] == pytest.approx([1, 1])
    heavy = local_factors(STEPS, SIZES, 0.1, momentum(0.5))
    assert heavy.l1[0] == pytest.approx([1.5 + 1, 1.875 + 1.75 + 1.5 + 1])
    assert heavy.last[0] == pytest.approx([1, 1])


def test_rounds_of_different_lengths() -> None:
    """‖a‖₁(‖a‖₁ − 1) is at most 0 in the first round and 6 in the second: C̃ takes the mean, D the larger."""
    seen = analyse(WEIGHTS, SIZES, np.array([[1, 1], [3, 1]]), 0.5, sgd(), ALL)
    assert seen.c_tilde == 3
    assert seen.d == pytest.approx(4 * 0.25 * 6 * 2**2)
    assert seen.effective_steps == (1, 2.5)
    assert [condition.holds for condition in seen.conditions] == [False] * 5


def test_five_terms() -> None:
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, sgd(), ALL)
    terms = seen.bound
    assert terms.start == pytest.approx(4 * 6 / (2 * 2.5 * 0.1))
    assert terms.noise == pytest.approx(4 * 0.1 * 2 * 9 * seen.a_tilde / 2)
    assert terms.local_noise == pytest.approx(10 * 0.01 * 4 * 9 * 2)
    assert terms.dissimilarity == pytest.approx(20 * 0.01 * 4 * 25 * 12)
    assert terms.varying_weights == pytest.approx(4 * 4 * (9 + 16) * 0.125)
    assert terms.total == pytest.approx(sum(vars(terms).values()))
    published = seen.published_bound
    assert published.noise == pytest.approx(4 * 0.1 * 2 * 9 * 0.46875 / 2)
    assert published.local_noise == pytest.approx(10 * 0.01 * 4 * 9 * 1.5)
    assert (published.start, published.dissimilarity) == (terms.start, terms.dissimilarity)


def test_both_sides_of_the_conditions() -> None:
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, sgd(), Constants(L=2, beta=2))
    sides = [(condition.left, condition.right, condition.holds) for condition in seen.conditions]
    assert sides == [
        (pytest.approx(0.5), 1, True),
        (pytest.approx(0.5), 0.5, True),
        (pytest.approx(0.48 * 4), pytest.approx(1 / 17), False),
        (2.5, 2.5, True),
        (1.5, 0, False),
    ]


def test_recast_weights_describe_the_same_round() -> None:
    factors = local_factors(STEPS, SIZES, 0.1, sgd())
    weights, effective = recast_weights(np.full((2, 2), 0.5), factors)
    assert weights[0] == pytest.approx([1 / 3, 2 / 3])
    assert effective == pytest.approx([3, 3])
    seen = analyse(np.full((2, 2), 0.5), SIZES, STEPS, 0.1, sgd(), recast=True)
    assert seen.objective == pytest.approx((1 / 3, 2 / 3))
    assert seen.conditions[-1].holds
    shares = np.tile(SIZES / SIZES.sum(), (2, 1))  # FedAvg: its own τ_eff comes back
    assert recast_weights(shares, factors)[1] == pytest.approx([2.5, 2.5])


def test_what_needs_a_constant_not_given_is_left_out() -> None:
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, sgd(), Constants(L=1, sigma=2))
    assert seen.bound.start is None
    assert seen.bound.dissimilarity is None
    assert seen.bound.varying_weights is None
    assert seen.bound.total is None
    assert seen.bound.noise is not None
    assert seen.conditions[2].holds is None


@pytest.mark.parametrize("given_", [Constants(), ALL])
def test_json_round_trip(given_: Constants) -> None:
    seen = analyse(WEIGHTS, SIZES, STEPS, 0.1, sgd(), given_).as_json()
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert seen["mean_variance"] == 0.0625
    assert seen["constants"]["G"] == given_.G


def test_a_power_of_two_beyond_floating_point() -> None:
    clients = 1500
    weights = np.full((2, clients), 1 / clients)
    steady = analyse(weights, np.ones(clients, int), np.ones((2, clients), int), 0.1, sgd(), ALL)
    assert steady.bound.varying_weights == 0
    weights[0, :2] = 0.5 / clients, 1.5 / clients
    varying = analyse(weights, np.ones(clients, int), np.ones((2, clients), int), 0.1, sgd(), ALL)
    assert varying.bound.total == float("inf")
    assert varying.as_json()["bound"]["total"] is None


# ---- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("L", 0),
        ("L", -1),
        ("sigma", -0.1),
        ("G", float("nan")),
        ("kappa", -1),
        ("beta", 0.5),
        ("gap", float("inf")),
    ],
)
def test_impossible_constants(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"constant {name} "):
        replace(Constants(), **{name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": WEIGHTS[0]}, "table"),
        ({"weights": np.empty((0, 2))}, "table"),
        ({"weights": 2 * WEIGHTS}, "round 0 gives weights that sum to 2"),
        ({"weights": WEIGHTS * np.nan}, "finite"),
        ({"sizes": SIZES[:1]}, r"\[K\]"),
        ({"sizes": np.array([3, 0])}, "sizes"),
        ({"steps": STEPS[:1]}, r"\[T, K\]"),
        ({"steps": 0 * STEPS}, "steps"),
        ({"steps": STEPS + 0.5}, "steps"),
        ({"lr": 0.0}, "lr"),
        ({"update": prox(20)}, "lr · mu"),
    ],
)
def test_impossible_input(change: dict[str, object], words: str) -> None:
    given_ = {"weights": WEIGHTS, "sizes": SIZES, "steps": STEPS, "lr": 0.1, "update": sgd()}
    with pytest.raises(InputError, match=words):
        analyse(**given_ | change)  # type: ignore[arg-type]


# ---- properties ----------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Θ[T, K], N[K] and τ[T, K]."""
    rounds, clients = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    stream = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = stream.dirichlet(np.ones(clients), rounds)
    return weights, stream.integers(1, 100, clients), stream.integers(1, 12, (rounds, clients))


@given(runs())
def test_variances_lie_between_those_of_constant_and_of_two_valued_weights(
    run: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    variances = weight_variances(run[0])
    assert (variances >= 0).all()
    assert (variances <= 0.25).all()


@given(runs())
def test_constant_weights_have_no_variance(run: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    weights, sizes, steps = run
    seen = analyse(np.tile(weights[0], (len(weights), 1)), sizes, steps, 0.01, sgd(), ALL)
    assert set(seen.variances) == {0.0}
    assert seen.bound.varying_weights == 0


@given(
    runs(),
    st.randoms(use_true_random=False),
    st.sampled_from([sgd(), prox(1), nova(), momentum(0.5), accumulated(prox(1))]),
    st.booleans(),
)
def test_the_order_of_clients_does_not_matter(
    run: tuple[np.ndarray, np.ndarray, np.ndarray], random: object, update: LocalOptimizer, recast: bool
) -> None:
    weights, sizes, steps = run
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one = analyse(weights, sizes, steps, 0.01, update, ALL, recast=recast)
    other = analyse(weights[:, order], sizes[order], steps[:, order], 0.01, update, ALL, recast=recast)
    assert other.variances == pytest.approx([one.variances[k] for k in order])
    assert other.effective_steps == pytest.approx(one.effective_steps)
    for terms, others in ((one.bound, other.bound), (one.published_bound, other.published_bound)):
        assert list(vars(others).values()) == pytest.approx(list(vars(terms).values()))
    assert [condition.holds for condition in other.conditions] == [c.holds for c in one.conditions]


# ---- learned weights -----------------------------------------------------------------------------------


def test_learned_weights_and_their_environment() -> None:
    """Sizes 7, 4, 9 in minibatches of 3, with 1, 2 and 2 epochs: 3, 4 and 6 steps."""
    env = tiny()
    algorithm = Algorithm(nova())
    learned = learn(
        simulated(env),
        env.rounds,
        algorithm=algorithm,
        learning=Learning(iterations=2),
        digest=env.digest(env.load()),
    )
    seen = analyse_learned(learned, env, ALL)
    expected = analyse(learned.weights.numpy(), np.array([7, 4, 9]), np.tile([3, 4, 6], (3, 1)), env.lr, nova(), ALL)
    assert seen == expected
    assert seen.mean_steps == pytest.approx(13 / 3)
    with pytest.raises(InputError, match="another federation"):
        analyse_learned(learned, env.replace(lr=0.1))
