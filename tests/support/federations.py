"""Small federations, and local training in plain PyTorch to check them against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.federation import Federation
from fedunfold.core.messages import ClientUpdates, Metric, TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.participation import Participation, RoundRng, epochs_at
from fedunfold.core.parts import CLIENT_SAMPLERS, LocalOptimizer
from fedunfold.core.run_result import RunResult
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.local import sgd
from fedunfold.rules import WeightingRule, size
from fedunfold.training.loop import run_rounds

RUN = "trial-0"
SIZES = {"a": 7, "b": 4, "c": 9}
EPOCHS = {"a": 1, "b": 2, "c": 2}  # in minibatches of 3: 3, 4 and 6 steps, short ones among them
CLASSES = 3


def tiny(
    sizes: Mapping[str, int] = SIZES,
    *,
    shape: tuple[int, ...] = (5,),
    epochs: int | Mapping[str, int | tuple[int, ...]] | None = None,
    **settings: Any,
) -> Environment:
    """Clients in the order of `sizes`; a client's data depend on its key and size alone."""
    stream = np.random.default_rng(0)
    test = stream.normal(size=(6, *shape)), np.arange(6) % CLASSES
    clients = {}
    for key, n in sizes.items():
        stream = np.random.default_rng([n, *key.encode()])
        clients[key] = stream.normal(size=(n, *shape)), stream.integers(0, CLASSES, n)
    defaults: dict[str, Any] = {"rounds": 3, "batch_size": 3, "lr": 0.3, "model": (4,)}
    chosen = {key: EPOCHS.get(key, 1) for key in sizes} if epochs is None else epochs
    return Environment.from_arrays(clients, test, epochs=chosen, **defaults | settings)


def label_skewed(**settings: Any) -> Environment:
    """Three blobs; one client alone holds the third class, and is as small as the others are large."""
    centres = np.array([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])

    def blobs(labels: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.array(labels)
        return centres[y] + 0.3 * np.random.default_rng(seed).normal(size=(len(y), 2)), y

    clients = {"zero": blobs([0] * 12, 1), "one": blobs([1] * 12, 2), "two": blobs([2] * 4, 3)}
    defaults: dict[str, Any] = {"rounds": 3, "batch_size": 12, "lr": 0.5, "epochs": 2}
    return Environment.from_arrays(clients, blobs([0, 1, 2] * 3, 4), **defaults | settings)


def simulated(
    env: Environment, model: ModelFactory | None = None, dtype: torch.dtype = torch.float64
) -> SimulatedFederation:
    return SimulatedFederation(env, model=model, dtype=dtype)


class ContractOnly:
    """A federation that offers nothing but the contract."""

    max_parallel_runs = 1
    sums_only = False

    def __init__(self, federation: SimulatedFederation) -> None:
        self.clients, self.lr, self.layout = federation.clients, federation.lr, federation.layout
        self.initial_model, self.train, self.evaluate = federation.initial_model, federation.train, federation.evaluate
        self.vjp, self.outer_loss = federation.vjp, federation.outer_loss


class BatchedRuns(SimulatedFederation):
    """Clients of several runs train together as on a GPU, runs go in pairs, and how many were requested is noted."""

    max_parallel_runs = 2

    def __init__(self, env: Environment, model: ModelFactory | None = None) -> None:
        super().__init__(env, model=model, dtype=torch.float64)
        self.trained: list[int] = []
        self.went_back: list[int] = []

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        self.trained.append(len(requests))
        return super().train(requests)

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        self.went_back.append(len(requests))
        return super().vjp(requests, participated, adjoints)

    def _batches_runs(self, requests: Sequence[TrainRequest]) -> bool:
        return True


def participation(env: Environment, run: str, t: int, reported: Mapping[Metric, Tensor] | None = None) -> Participation:
    """Who takes part in a round of an environment, given what clients last reported where the sampler reads it."""
    clients = env.clients
    return RoundRng(env.seed, run, t).participation(
        [client.key for client in clients],
        [client.participation_probability for client in clients],
        np.array(env.load().sizes),
        env.clients_per_round,
        CLIENT_SAMPLERS.parse(env.client_sampler),
        reported,
    )


def assert_same(found: Tensor | None, expected: Tensor, tolerance: float = 1e-10, *, unknown: bool = False) -> None:
    """With `unknown`, NaN in both places is the same too: what was not reported."""
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=unknown)


def train(
    federation: SimulatedFederation,
    *metrics: Metric,
    optimizer: LocalOptimizer | None = None,
    round: int = 0,
    **more: Any,
) -> ClientUpdates:
    """One round from the initial model."""
    start = federation.initial_model(RUN)
    request = TrainRequest(RUN, round, start, optimizer or sgd(), required_metrics=frozenset(metrics), **more)
    return federation.train([request])[0]


def run_one(
    federation: Federation, rule: WeightingRule, rounds: int, *, run: str = RUN, algorithm: Algorithm | None = None
) -> RunResult:
    """One run."""
    (result,) = run_rounds(federation, rule, rounds, [run], algorithm=algorithm)
    return result


def final_model(env: Environment, optimizer: LocalOptimizer, rule: Any = None, **settings: Any) -> Tensor:
    """Where a run of an environment ends, by size unless said otherwise."""
    return run_one(simulated(env), rule or size(), env.rounds, algorithm=Algorithm(optimizer, **settings)).model


def mlp(env: Environment) -> ModelFactory:
    features = tuple(env.load().x.shape[1:])
    return model_factory(env.model, features, CLASSES)


def convolution() -> nn.Module:
    """For features of shape (1, 4, 4)."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES))


@dataclass(frozen=True)
class Trained:
    """One client's local training: w_k, the minibatch losses met, and the sum of their gradients."""

    model: Tensor
    losses: list[float]
    gradient: Tensor


class Plain:
    """Local training as one would write it with `torch.optim.SGD`, on the package's minibatch schedule."""

    def __init__(self, env: Environment, build: ModelFactory, dtype: torch.dtype = torch.float64):
        self.env, self.build, self.dtype = env, build, dtype
        self.data = env.load()
        sizes = torch.tensor(self.data.sizes, dtype=torch.float64)
        self.shares: list[float] = (sizes / sizes.sum()).tolist()

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = self.data.client(k)
        return x.to(self.dtype), y

    def batches(self, t: int, k: int) -> list[tuple[Tensor, Tensor]]:
        x, y = self.client(k)
        pieces: list[Tensor] = []
        for epoch in range(epochs_at(self.env.clients[k].epochs, t)):
            order = RoundRng(self.env.seed, RUN, t).permutation(self.data.keys[k], epoch, len(y))
            pieces += torch.split(torch.from_numpy(order), self.env.batch_size)
        return [(x[rows], y[rows]) for rows in pieces]

    def participated(self, t: int) -> list[bool]:
        here: list[bool] = participation(self.env, RUN, t).participating.tolist()
        return here

    def steps(self, t: int) -> list[int]:
        """τ_k, 0 for an absent client."""
        return [len(self.batches(t, k)) if here else 0 for k, here in enumerate(self.participated(t))]

    def module(self, model: Tensor) -> nn.Module:
        module = self.build().to(self.dtype)
        vector_to_parameters(model.clone(), trainable(module))
        return module

    def train(self, start: Tensor, t: int, k: int, *, scale: float = 1.0, mu: float = 0.0, rho: float = 0.0) -> Trained:
        module = self.module(start)
        parameters = trainable(module)
        optimizer = torch.optim.SGD(parameters, lr=self.env.lr * scale, momentum=rho)
        anchors = [p.detach().clone() for p in parameters]
        losses, gradient = [], torch.zeros_like(start)
        for x, y in self.batches(t, k):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            gradient += parameters_to_vector([_gradient(p) for p in parameters])
            for p, anchor in zip(parameters, anchors, strict=True):
                _gradient(p).add_(p.detach() - anchor, alpha=mu)
            optimizer.step()
        return Trained(parameters_to_vector(parameters).detach(), losses, gradient)

    def losses_at(self, model: Tensor, t: int, k: int) -> list[float]:
        """Mean loss of each of the round's minibatches, all at the same model."""
        module = self.module(model)
        return [nn.functional.cross_entropy(module(x), y).item() for x, y in self.batches(t, k)]

    def averaged(self, start: Tensor, rounds: int, **local: float) -> Tensor:
        """w ← Σ_k (N_k/N) w_k round after round; an absent client's w_k is w."""
        w = start
        for t in range(rounds):
            parts = [
                share * (self.train(w, t, k, **local).model if here else w)
                for k, (share, here) in enumerate(zip(self.shares, self.participated(t), strict=True))
            ]
            w = torch.stack(parts).sum(0)
        return w


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
