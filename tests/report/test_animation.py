"""The slider's frames: small, and near enough to the weights they stand for."""

import base64

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.report import animation
from fedunfold.report.animation import Frames
from fedunfold.rules.learned import LearnedWeights


def unpacked(packed: dict[str, object]) -> np.ndarray:
    """What the page does with them: [frames, K, T]."""
    parts = np.frombuffer(base64.b64decode(str(packed["values"])), dtype="<u2")
    return parts.reshape(-1, int(str(packed["clients"])), int(str(packed["rounds"]))) * float(str(packed["unit"]))


@given(seed=st.integers(0, 2**32 - 1), shape=st.tuples(*[st.integers(1, 5)] * 3), scale=st.floats(1e-9, 1e3))
def test_packed_weights_are_off_by_half_a_step_at_most(seed: int, shape: tuple[int, int, int], scale: float) -> None:
    values = scale * np.random.default_rng(seed).random(shape)
    found = unpacked(Frames(values, ("",) * shape[0]).as_json())
    assert np.abs(found - values.swapaxes(1, 2)).max() <= values.max() / 131_000


def test_weights_that_are_all_zero() -> None:
    assert not unpacked(Frames(np.zeros((1, 2, 3)), ("",)).as_json()).any()


def history(iterations: int, rounds: int, clients: int) -> LearnedWeights:
    values = torch.rand(iterations + 1, rounds, clients, dtype=torch.float64)
    losses = torch.arange(iterations, dtype=torch.float64)
    return LearnedWeights(tuple(map(str, range(clients))), values[-1], losses, values, {})


@given(iterations=st.integers(1, 300), rounds=st.integers(1, 20), clients=st.integers(1, 20))
def test_the_first_and_the_last_are_always_there(iterations: int, rounds: int, clients: int) -> None:
    learned = history(iterations, rounds, clients)
    found = animation.of_learning(learned)
    assert len(found.captions) == len(found.values) <= animation.MOST_FRAMES
    assert np.array_equal(found.values[0], learned.history[0].numpy())
    assert np.array_equal(found.values[-1], learned.weights.numpy())
    assert found.captions[0] == "Start, outer loss 0"
    assert found.captions[-1] == f"After iteration {iterations} of {iterations}: learned"


def test_a_long_history_of_a_large_federation_stays_small() -> None:
    found = animation.of_learning(history(60, 100, 200))
    assert found.values.size <= animation.MOST_VALUES
    assert len(str(found.as_json()["values"])) < 2e6
