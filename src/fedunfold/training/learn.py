"""Learn weights for an environment, in this process."""

import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedunfold.config import Environment, environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ModelFactory
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.learned import LearnedWeights
from fedunfold.tracking import Callback, callback_scope
from fedunfold.tracking.scalars import iteration_records
from fedunfold.unfolding import Learning, check_learnable, check_learning, learn
from fedunfold.version import VERSION


def device_of(given: str | torch.device) -> torch.device:
    """The device of that name, where it can be used here."""
    name = str(given)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"unknown device '{name}'; choose cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device '{name}' cannot be used here; choose cpu, or cuda on a machine with one.") from error
    return device


def digest_of(federation: SimulatedFederation, model: ModelFactory | None) -> str:
    """What learned weights record of their federation; a custom model counts by its shapes."""
    digest = federation.environment.digest(federation.environment.load())
    if model is None:
        return digest
    shapes = [list(shape) for shape in federation.layout.shapes]
    return hashlib.sha256(f"{digest} {shapes}".encode()).hexdigest()


def learn_weights(
    env: Environment | str | Path,
    *,
    algorithm: Algorithm | None = None,
    learning: Learning | None = None,
    model: ModelFactory | None = None,
    fraction: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> LearnedWeights:
    """Learn how much each client should count in each round of an environment.

    Args:
        env: An environment, the name of a bundled one, or a TOML file.
        algorithm: What the weights will be used with: local and server optimiser, treatment of absent clients.
        learning: How they are learned.
        model: A function that builds a classifier in place of the environment's own.
        fraction: The part of its data that every client learns weights with.
        device: ``cpu`` or ``cuda``.
        dtype: The precision of the models.
        checkpoint: A file from which an interrupted run is resumed.
        callback: Called after every outer iteration; it may stop learning there.

    Returns:
        The learned weights Θ[t, k], with their history.

    Raises:
        InputError: Weights cannot be learned through the algorithm, or something does not fit the environment.
        DivergenceError: Training left the finite numbers.

    >>> import fedunfold as fu
    >>> learned = fu.learn_weights("digits-label-skew", learning=fu.Learning(iterations=2))
    >>> learned.weights.shape
    torch.Size([10, 5])
    """
    env = environment(env)
    data = env.load()
    federation = SimulatedFederation(
        env, data.restricted(fraction, env.seed), model=model, device=device_of(device), dtype=dtype
    )
    algorithm, learning = algorithm or Algorithm(), learning or Learning()
    check_learnable(algorithm)
    check_learning(learning)
    settings = {"algorithm": algorithm.describe(), "learning": asdict(learning), "fraction": fraction}
    with callback_scope(callback, {**described("learn", env, data, device, dtype), **settings}) as callbacks:
        learned = learn(
            federation,
            env.rounds,
            algorithm=algorithm,
            learning=learning,
            digest=digest_of(federation, model),
            checkpoint=checkpoint,
            on_iteration=lambda so_far: callbacks.on_outer_step(LearnedWeights.name, so_far, learning.iterations),
        )
        callbacks.on_results([{"method": LearnedWeights.name, **iteration_records(learned)[-1]}])
    return learned


def described(command: str, env: Environment, data: FederatedData, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What a callback is given about every run: the federation and what it is computed on."""
    return {
        "command": command,
        "environment": env.name,
        "clients": list(data.keys),
        "rounds": env.rounds,
        "batch_size": env.batch_size,
        "lr": env.lr,
        "seed": env.seed,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "version": VERSION,
    }
