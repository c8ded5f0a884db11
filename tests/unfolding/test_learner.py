"""The outer loop."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.federation import Federation
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.local import accumulated, momentum, nova, prox
from fedunfold.rules.learned import LearnedWeights
from fedunfold.server import adam
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import AdjointKind, UnrolledResult, unroll_and_grad
from fedunfold.unfolding.learner import _kl_gradient
from fedunfold.unfolding.state import normalize_squares
from tests.support.federations import BatchedRuns, label_skewed, simulated, tiny
from tests.support.saving import save_learned


def learned(env: Environment, dtype: torch.dtype = torch.float64, **settings: Any) -> LearnedWeights:
    algorithm = settings.pop("algorithm", None)
    learning = Learning(**{"iterations": 3, "lr": 0.1} | settings)
    return learn(simulated(env, dtype=dtype), env.rounds, algorithm=algorithm, learning=learning)


def unrolled(federation: Federation, theta: Tensor, adjoint: AdjointKind, run: str, start: Tensor) -> UnrolledResult:
    """One run by the path loss, from this model."""
    parts = (federation, theta, Algorithm(), OUTER_LOSSES.make("path"), adjoint)
    return unroll_and_grad(*parts, runs=[run], models=[start])[0]


def assert_on_simplex(weights: Tensor) -> None:
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))


# --- learning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_outer_loss_goes_down(adjoint: str, dtype: torch.dtype) -> None:
    result = learned(label_skewed(), dtype, adjoint=adjoint, iterations=15, outer="balanced")
    losses = result.losses.tolist()
    assert losses[-1] < 0.97 * losses[0]
    assert min(losses) >= min(losses[-3:]) - 0.01 * losses[0]


def test_the_client_with_the_rare_class_gains() -> None:
    """It alone holds a third of the balanced objective and gets a seventh by size."""
    result = learned(label_skewed(), iterations=15, outer="balanced")
    assert result.history[0, -1, 2].item() == pytest.approx(1 / 7)
    assert result.weights[:, 2].mean().item() > 1 / 7 + 0.05


def test_shapes_and_contents() -> None:
    env = label_skewed(participation_probability=0.8)
    algorithm, learning = Algorithm(nova(), absent="drop"), Learning(iterations=4, lr=0.1, outer="sample")
    result = learn(simulated(env), 3, algorithm=algorithm, learning=learning, digest="abc")
    assert result.client_ids == ("zero", "one", "two")
    assert result.weights.shape == (3, 3)
    assert result.losses.shape == (4,)
    assert result.history.shape == (5, 3, 3)
    assert {part.dtype for part in (result.weights, result.losses, result.history)} == {torch.float64}
    assert torch.equal(result.history[-1], result.weights)
    by_size = torch.tensor([[12, 12, 4]] * 3, dtype=torch.float64) / 28
    torch.testing.assert_close(result.history[0], by_size)
    assert_on_simplex(result.history)
    assert result.digest == "abc"
    assert result.settings["rounds"] == 3
    assert result.settings["learning"]["outer"] == "sample"
    assert result.settings["algorithm"]["local"]["name"] == "nova"
    assert result.settings["algorithm"]["absent"] == "drop"


@pytest.mark.parametrize(("name", "betas"), [("adam", (0.9, 0.999)), ("rmsprop", (0.0, 0.9))])
def test_every_iteration_is_one_step_of_the_optimizer(name: str, betas: tuple[float, float]) -> None:
    """Two iterations, by torch.optim.Adam on the gradients that `unroll_and_grad` gives."""
    env = label_skewed()
    federation = simulated(env)
    theta = (torch.tensor([12, 12, 4], dtype=torch.float64) / 28).sqrt().repeat(3, 1)
    optimizer = torch.optim.Adam([theta], lr=0.1, betas=betas)
    start = federation.initial_model("learn-0")
    losses = []
    for m in range(2):
        step = unrolled(federation, theta, "first_order", f"learn-{m}", start)
        theta.grad = step.gradient
        optimizer.step()
        losses.append(step.loss)
    result = learned(env, iterations=2, optimizer=name, decay="none")
    assert result.losses.tolist() == losses
    torch.testing.assert_close(result.weights, theta**2 / (theta**2).sum(1, keepdim=True))


def test_the_callback_is_called_after_every_iteration() -> None:
    seen: list[LearnedWeights] = []
    learning = Learning(iterations=3, lr=0.1)
    result = learn(simulated(label_skewed()), 3, learning=learning, on_iteration=seen.append)
    assert [len(part.losses) for part in seen] == [1, 2, 3]
    assert [len(part.history) for part in seen] == [2, 3, 4]
    for m, part in enumerate(seen):
        assert torch.equal(part.losses, result.losses[: m + 1])
        assert torch.equal(part.weights, result.history[m + 1])
        assert part.settings == result.settings


def test_learned_weights_run() -> None:
    env = label_skewed()
    result = learned(env)
    (run,) = run_rounds(simulated(env), result, env.rounds)
    assert torch.equal(run.weights, result.weights)


def test_more_iterations_leave_the_first_ones_as_they_were() -> None:
    """What a shorter learning gives is what a longer one had before its end."""
    short, long = (learned(label_skewed(), iterations=n, decay="none") for n in (2, 4))
    assert torch.equal(short.history, long.history[:3])


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize("local", [momentum(0.5), accumulated(momentum(0.5))], ids=lambda local: local.name)
def test_learning_through_local_momentum(local: LocalOptimizer, adjoint: str) -> None:
    result = learned(label_skewed(), algorithm=Algorithm(local), adjoint=adjoint, iterations=10, outer="balanced")
    assert_on_simplex(result.history)
    assert result.losses[-1] < 0.97 * result.losses[0]
    assert result.algorithm == Algorithm(local)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(prox(0.3), absent="remember"),
        Algorithm(nova(), adam(0.1), "drop", "skip"),
        Algorithm(accumulated(prox(0.3)), absent="keep"),
    ],
    ids=["prox-remember", "nova-adam-drop", "accumulated-keep"],
)
@settings(max_examples=4)
@given(seed=st.integers(0, 1000))
def test_what_is_learned_is_weights(adjoint: str, algorithm: Algorithm, seed: int) -> None:
    env = tiny(seed=seed, participation_probability=0.6, rounds=2)
    result = learned(env, adjoint=adjoint, algorithm=algorithm, iterations=2, lr=0.5)
    assert_on_simplex(result.history)
    assert result.losses.isfinite().all()


@given(st.lists(st.floats(1e-3, 10).flatmap(lambda x: st.sampled_from([x, -x])), min_size=1, max_size=6))
def test_squares_over_their_sum(row: list[float]) -> None:
    theta = torch.tensor(row, dtype=torch.float64)
    total = sum(value**2 for value in row)
    assert normalize_squares(theta).tolist() == pytest.approx([value**2 / total for value in row])
    assert_on_simplex(normalize_squares(theta.repeat(2, 1)))


# --- more than the paper -----------------------------------------------------------------------------------


def test_step_sizes_are_learned_beside_the_weights() -> None:
    """The first iteration by hand: Adam moves every root by `lr` against the sign of its gradient."""
    env = label_skewed()
    federation = simulated(env)
    theta = (torch.tensor([12, 12, 4], dtype=torch.float64) / 28).sqrt().repeat(3, 1)
    start = federation.initial_model("learn-0")
    found = unrolled(federation, theta, "exact", "learn-0", start)
    result = learned(env, iterations=1, adjoint="exact", step_sizes="learned")
    sizes = result.settings["algorithm"]["step_sizes"]
    assert sizes == pytest.approx([(1 - 0.1 * sign) ** 2 for sign in found.step_gradient.sign().tolist()])
    torch.testing.assert_close(result.weights, normalize_squares(theta - 0.1 * found.gradient.sign()))


def test_step_sizes_are_learned_from_those_of_the_algorithm() -> None:
    result = learned(
        label_skewed(), iterations=1, lr=1e-6, step_sizes="learned", algorithm=Algorithm(step_sizes=(0.5, 2.0))
    )
    assert result.settings["algorithm"]["step_sizes"] == pytest.approx([0.5, 2.0, 2.0], abs=1e-4)


def test_learned_step_sizes_lower_the_loss_further() -> None:
    ones, learned_ones = (
        learned(label_skewed(), iterations=15, adjoint="exact", step_sizes=kind) for kind in ("fixed", "learned")
    )
    assert learned_ones.losses[-1] < 0.98 * ones.losses[-1]
    assert ones.settings["algorithm"]["step_sizes"] == ()


def test_a_step_averages_its_samples() -> None:
    env = tiny(participation_probability=0.6)
    federation = simulated(env)
    sizes = torch.tensor(federation.data.sizes, dtype=torch.float64)
    theta = (sizes / sizes.sum()).sqrt().repeat(3, 1)
    start = federation.initial_model("learn-0")
    found = [unrolled(federation, theta, "first_order", run, start) for run in ("learn-0", "learn-0-1", "learn-0-2")]
    result = learned(env, iterations=1, num_samples=3)
    assert len({part.loss for part in found}) == 3
    assert result.losses[0].item() == pytest.approx(sum(part.loss for part in found) / 3)
    mean = torch.stack([part.gradient for part in found]).mean(0)
    torch.testing.assert_close(result.weights, normalize_squares(theta - 0.1 * mean.sign()))


@pytest.mark.parametrize("initial_model", ["fixed", "resample"])
@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_samples_are_batched_as_far_as_it_is_worth_it(adjoint: AdjointKind, initial_model: Any) -> None:
    """Three of them, in a pair and alone, in both iterations."""
    env = tiny(participation_probability=0.8)
    learning = Learning(
        iterations=2,
        num_samples=3,
        adjoint=adjoint,
        initial_model=initial_model,
        step_sizes="learned",
        outer="balanced",
    )
    apart, pairs = simulated(env), BatchedRuns(env)
    assert apart.max_parallel_runs == 1
    wanted, found = (learn(federation, env.rounds, learning=learning) for federation in (apart, pairs))
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.history, wanted.history, rtol=1e-12, atol=1e-12)
    assert found.settings["algorithm"]["step_sizes"] == pytest.approx(wanted.settings["algorithm"]["step_sizes"])
    assert pairs.trained == 2 * (3 * [2] + 3 * [1])
    assert set(pairs.went_back) == ({1, 2} if adjoint == "exact" else set())


def test_tied_rounds_have_the_same_weights_and_step_sizes() -> None:
    result = learned(tiny(rounds=5, participation_probability=0.7), tie_rounds=2, step_sizes="learned")
    weights, sizes = result.weights, result.settings["algorithm"]["step_sizes"]
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(weights[first], weights[second])
        assert sizes[first] == sizes[second]
    assert len({tuple(row) for row in weights.tolist()}) == 3


def test_linear_decay_by_hand() -> None:
    assert [Learning(iterations=4, lr=0.2, decay="linear").step(m) for m in range(4)] == pytest.approx(
        [0.2, 0.15, 0.1, 0.05]
    )
    assert Learning(iterations=4, lr=0.2, decay="none").step(3) == 0.2
    falling, constant = (learned(label_skewed(), decay=decay) for decay in ("linear", "none"))
    assert torch.equal(falling.history[1], constant.history[1])
    moved = [(result.history[3] - result.history[2]).norm().item() for result in (falling, constant)]
    assert moved[0] == pytest.approx(moved[1] / 3, rel=0.5)


def test_a_large_kl_weight_holds_the_sizes() -> None:
    free, held = (learned(label_skewed(), iterations=30, lr=0.02, kl_weight=weight) for weight in (0.0, 100.0))
    away = [(result.weights - result.history[0]).abs().max().item() for result in (free, held)]
    assert away[1] < 0.2 * away[0]


@settings(max_examples=20)
@given(row=st.lists(st.floats(0.1, 2), min_size=2, max_size=5), strength=st.floats(0.1, 10))
def test_the_gradient_of_the_kl_penalty(row: list[float], strength: float) -> None:
    theta = torch.tensor([row, row[::-1]], dtype=torch.float64, requires_grad=True)
    shares = torch.arange(1, len(row) + 1, dtype=torch.float64)
    shares = shares / shares.sum()
    penalty = strength * (shares * (shares / normalize_squares(theta)).log()).sum(1).mean()
    expected = torch.autograd.grad(penalty, theta)[0]
    torch.testing.assert_close(_kl_gradient(theta.detach(), shares, strength), expected)


# --- resuming ----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_learning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedunfold.io.checkpoint.CHECKPOINT_SECONDS", 0.0)
    federation, file = simulated(label_skewed()), tmp_path / "checkpoint.safetensors"
    whole = learn(federation, 3, learning=Learning(iterations=2), checkpoint=file)
    again = learn(federation, 3, learning=Learning(iterations=2), checkpoint=file)
    assert torch.equal(again.history, whole.history)
    with pytest.raises(InputError, match="of another learning"):
        learn(federation, 3, learning=Learning(iterations=2, lr=0.3), checkpoint=file)
    with pytest.raises(InputError, match="of another learning"):
        learn(federation, 3, learning=Learning(iterations=2), digest="other", checkpoint=file)
    for other in (simulated(label_skewed(seed=7)), simulated(label_skewed(), dtype=torch.float32)):
        with pytest.raises(InputError, match="of another learning"):
            learn(other, 3, learning=Learning(iterations=2), checkpoint=file)
    for damaged in tmp_path.iterdir():
        damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(InputError, match="is damaged"):
        learn(federation, 3, learning=Learning(iterations=2), checkpoint=file)


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_a_callback_stops_learning_early_and_it_can_be_resumed(tmp_path: Path, seconds: float) -> None:
    file, learning = tmp_path / "checkpoint.safetensors", Learning(iterations=5)

    def on_iteration(so_far: LearnedWeights) -> bool:
        return len(so_far.losses) == 2

    def learned_so_far(on_iteration: Any) -> LearnedWeights:
        return learn(
            simulated(label_skewed()),
            3,
            learning=learning,
            checkpoint=file,
            checkpoint_seconds=seconds,
            on_iteration=on_iteration,
        )

    early = learned_so_far(on_iteration)
    assert len(early.losses) == 2
    assert torch.equal(learned_so_far(on_iteration).weights, early.weights), "it stops where it had stopped"
    seen: list[int] = []
    whole = learned_so_far(lambda so_far: seen.append(len(so_far.losses)))
    assert seen == [2, 3, 4, 5]
    assert torch.equal(whole.history, learn(simulated(label_skewed()), 3, learning=learning).history)


# --- randomness --------------------------------------------------------------------------------------------


def test_a_fresh_initial_model_each_time_is_another_learning() -> None:
    fixed, resampled = (learned(label_skewed(), initial_model=kind) for kind in ("fixed", "resample"))
    assert fixed.losses[0] == resampled.losses[0]  # both start with the same one
    assert fixed.losses[1] != resampled.losses[1]
    assert not torch.allclose(fixed.weights, resampled.weights, atol=1e-4)


def test_another_seed_is_another_learning() -> None:
    one, other = (learned(label_skewed(seed=seed)) for seed in (0, 1))
    assert not torch.allclose(one.weights, other.weights, atol=1e-4)


def test_the_same_learning_gives_the_same_bytes(tmp_path: Path) -> None:
    here, again, elsewhere = (tmp_path / f"{name}.safetensors" for name in ("here", "again", "elsewhere"))
    save_learned(here)
    save_learned(again)
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    subprocess.run(
        [sys.executable, "-m", "tests.support.saving", str(elsewhere)],
        cwd=root,
        env=environment,
        check=True,
        timeout=120,
    )
    assert here.read_bytes() == again.read_bytes() == elsewhere.read_bytes()


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, -2])
def test_learning_needs_rounds(rounds: int) -> None:
    with pytest.raises(InputError, match=f"at least 1 round, not {rounds}"):
        learn(simulated(label_skewed()), rounds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "iterations of a learning must be a whole number of at least 1, not 0"),
        ({"lr": 0.0}, "between 0 and 1, not 0"),
        ({"lr": 1.0}, "between 0 and 1, not 1"),
        ({"lr": float("nan")}, "between 0 and 1, not nan"),
        ({"adjoint": "second_order"}, "adjoint of a learning is one of first_order, exact, not 'second_order'"),
        ({"outer": "mean"}, "unknown outer loss 'mean'"),
        ({"initial_model": "new"}, "one of fixed, resample, not 'new'"),
        ({"num_samples": 0}, "num_samples of a learning must be a whole number of at least 1, not 0"),
        ({"kl_weight": -1.0}, "a finite number >= 0, not -1"),
        ({"kl_weight": float("inf")}, "a finite number >= 0, not inf"),
        ({"step_sizes": "two"}, "one of fixed, learned, not 'two'"),
        ({"decay": "cosine"}, "one of none, linear, not 'cosine'"),
        ({"optimizer": "sgd"}, "one of adam, rmsprop, not 'sgd'"),
        ({"tie_rounds": 0}, "tie_rounds of a learning must be a whole number of at least 1, not 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Learning(**settings)


@pytest.mark.parametrize("adjoint", ["first_order", "exact"])
def test_divergence_is_an_error(adjoint: str) -> None:
    with pytest.raises(DivergenceError, match=r"round \d"):
        learned(tiny(lr=1e38), torch.float32, adjoint=adjoint)


def test_the_first_step_leaves_every_one_of_many_clients_some_weight() -> None:
    """θ = √(1/K) is as small as a step where there are many clients."""
    result = learned(tiny({f"c{k}": 4 for k in range(100)}, rounds=2), iterations=1, lr=0.1)
    # θ goes to half or to one and a half of what it was.
    assert result.weights.min() * 100 >= 0.25 / 2.25
    assert result.weights.max() * 100 > 1
