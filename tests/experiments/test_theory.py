"""The convergence bound: by hand on small cases, and against local SGD on quadratics."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.errors import InputError
from fedunfold.experiments.theory import (
    Constants,
    Theory,
    analyse,
    analyse_learned,
    local_factors,
    recast_weights,
    weight_variances,
)
from fedunfold.rounds import Algorithm
from fedunfold.unfolding import Learning, learn
from fedunfold.updates import LocalUpdate, accumulated, momentum, nova, prox, sgd
from tests.federations import simulated, tiny

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
    run: tuple[np.ndarray, np.ndarray, np.ndarray], random: object, update: LocalUpdate, recast: bool
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


# ---- quadratics ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """What a federated run on quadratics met: mean_t ‖∇f(w^(t))‖², and the theorem's view of it."""

    gradient: float
    theory: Theory


@dataclass(frozen=True)
class Quadratics:
    """f_k(w) = ½ (w − c_k)ᵀ H (w − c_k), H diagonal and the same for all, so that β = 1 and L = max H.

    Σ_k ω_k‖∇f_k‖² − ‖Σ_k ω_k ∇f_k‖² is a variance of the H c_k, at most max_k ‖H c_k‖²: this is κ². Gradients
    carry Gaussian noise of total variance σ². Several runs side by side stand for the expectation.
    """

    curvature: np.ndarray
    centres: np.ndarray
    sigma: float = 0.0
    runs: int = 20

    def walk(
        self,
        start: np.ndarray,
        weights: np.ndarray,
        sizes: np.ndarray,
        steps: np.ndarray,
        lr: float,
        update: LocalUpdate,
        *,
        recast: bool = False,
    ) -> Walk:
        """Local SGD from `start`, averaged with Θ, then put beside the bound with its known constants."""
        stream = np.random.default_rng(0)
        shape = (self.runs, *self.centres.shape)
        spread = self.sigma / np.sqrt(len(self.curvature))
        objective = analyse(weights, sizes, steps, lr, update, recast=recast).objective
        optimum = np.array(objective) @ self.centres
        w = np.tile(start, (self.runs, 1))
        squares, largest = [], 0.0
        for row, counts in zip(weights, steps, strict=True):
            squares.append((((w - optimum) * self.curvature) ** 2).sum(1).mean())
            inside, after = update.scales(sizes, counts, lr)
            local = np.repeat(w[:, None], len(sizes), axis=1)
            for step in range(counts.max()):
                gradient = self.curvature * (local - self.centres)
                largest = max(largest, float((gradient**2).sum(-1).max()))
                noise = stream.normal(scale=spread, size=shape) if self.sigma else 0.0
                scale = lr * inside * (step < counts)
                local = local - scale[:, None] * (gradient + noise)
            w = w + np.einsum("k,rkd->rd", row * after, local - w[:, None])
        constants = Constants(
            L=float(self.curvature.max()),
            sigma=self.sigma,
            G=float(np.sqrt(largest + self.sigma**2)),
            kappa=float(np.sqrt(((self.centres * self.curvature) ** 2).sum(1).max())),
            beta=1,
            gap=float(0.5 * (self.curvature * (start - optimum) ** 2).sum()),
        )
        theory = analyse(weights, sizes, steps, lr, update, constants, recast=recast)
        return Walk(float(np.mean(squares)), theory)


def holding(walk: Walk) -> None:
    assert all(condition.holds for condition in walk.theory.conditions), walk.theory.conditions


@pytest.mark.parametrize(("update", "steps"), [(sgd(), [5, 5]), (nova(), [2, 8]), (accumulated(sgd()), [2, 8])])
def test_without_noise_and_skew_the_first_term_alone_bounds(update: LocalUpdate, steps: list[int]) -> None:
    rounds = 200
    same = Quadratics(np.linspace(0.2, 2, 10), np.zeros((2, 10)), runs=1)
    seen = same.walk(
        np.ones(10), np.full((rounds, 2), 0.5), np.array([5, 5]), np.tile(steps, (rounds, 1)), 0.01, update
    )
    holding(seen)
    assert seen.theory.bound.start is not None
    assert seen.theory.bound.total == seen.theory.bound.start
    assert seen.theory.bound.start / 100 < seen.gradient < seen.theory.bound.start


CASES = [(sgd(), [6, 6], False), (nova(), [2, 9], False), (accumulated(sgd()), [2, 9], False)]


@pytest.mark.parametrize(("update", "steps", "recast"), [*CASES, (sgd(), [2, 9], True)])
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_the_bound_holds_with_noise_and_skew(update: LocalUpdate, steps: list[int], recast: bool, sigma: float) -> None:
    rounds = 60
    centres = np.array([[1.0, 0, 0.5], [-1, 0, -0.5]])
    skewed = Quadratics(np.array([1.0, 0.5, 2]), centres, sigma)
    weights = np.tile([0.3, 0.7], (rounds, 1))
    seen = skewed.walk(
        np.full(3, 2.0), weights, np.array([40, 60]), np.tile(steps, (rounds, 1)), 0.01, update, recast=recast
    )
    holding(seen)
    assert seen.theory.bound.total is not None
    assert seen.theory.bound.total / 100 < seen.gradient < seen.theory.bound.total


@pytest.mark.parametrize(("update", "steps", "recast"), CASES)
def test_the_bound_holds_for_weights_that_vary(update: LocalUpdate, steps: list[int], recast: bool) -> None:
    rounds = 60
    skewed = Quadratics(np.array([1.0, 2]), np.array([[3.0, 0], [-3, 0]]), sigma=1.0)
    swinging = 0.5 + 0.4 * np.cos(np.pi * np.arange(rounds))
    weights = np.stack([swinging, 1 - swinging], axis=1)
    seen = skewed.walk(
        np.zeros(2), weights, np.array([50, 50]), np.tile(steps, (rounds, 1)), 0.01, update, recast=recast
    )
    holding(seen)
    assert seen.theory.mean_variance == pytest.approx(0.16)
    assert seen.theory.bound.total is not None
    assert seen.gradient < seen.theory.bound.total


def test_the_published_bound_is_exceeded_by_many_noisy_steps() -> None:
    """One client, τ = 32: the noise settles at ‖∇f‖² ≈ ηLσ²/2, and the published term is 4ηLσ²/τ."""
    rounds, lr, sigma = 300, 5e-4, 1.0
    noisy = Quadratics(np.ones(20), np.zeros((1, 20)), sigma, runs=20)
    seen = noisy.walk(np.zeros(20), np.ones((rounds, 1)), np.array([1]), np.full((rounds, 1), 32), lr, sgd())
    holding(seen)
    assert seen.theory.published_bound.total is not None
    assert seen.theory.bound.total is not None
    assert seen.theory.published_bound.total < 0.8 * seen.gradient
    assert seen.gradient < seen.theory.bound.total < 100 * seen.gradient


def test_unequal_plain_steps_are_outside_the_theorem_unless_recast() -> None:
    """Plain SGD with τ = (1, 9) under equal weights goes to (c_0 + 9 c_1)/10, where f's gradient is not 0."""
    rounds, steps = 400, np.tile([1, 9], (400, 1))
    pair = Quadratics(np.ones(1), np.array([[1.0], [-1.0]]), runs=1)
    given_ = (np.array([-0.8]), np.full((rounds, 2), 0.5), np.array([1, 1]), steps, 0.01, sgd())
    plain, recast = pair.walk(*given_), pair.walk(*given_, recast=True)
    assert [condition.holds for condition in plain.theory.conditions] == [True] * 4 + [False]
    assert plain.theory.bound.total is not None
    assert plain.gradient > 2 * plain.theory.bound.total
    holding(recast)
    assert recast.theory.bound.total is not None
    assert recast.gradient < recast.theory.bound.total


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
        analyse_learned(learned, env.with_(lr=0.1))
