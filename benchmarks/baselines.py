"""What our engine is measured against, written as one would without it."""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedunfold.config import Environment
from fedunfold.config.model import model_factory
from fedunfold.core.params import seeded
from fedunfold.core.participation import RoundRng


def plain_loop(env: Environment, run: str = "trial-0") -> nn.Module:
    """FedAvg as a researcher writes it: clients one after the other, autograd and an optimiser for each, weights by
    size, a test after every round."""
    data = env.load()
    server = model(env, run)
    for t in range(env.rounds):
        average: dict[str, Tensor] = {}
        for k, size in enumerate(data.sizes):
            client = deepcopy(server)
            optimizer = torch.optim.SGD(client.parameters(), lr=env.lr)
            for x, y in minibatches(env, k, run, t):
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(client(x), y))
                optimizer.step()
            for name, value in client.state_dict().items():
                part = value * (size / sum(data.sizes))
                average[name] = average[name] + part if name in average else part
        server.load_state_dict(average)
        with torch.no_grad():
            (server(data.x_test).argmax(1) == data.y_test).float().mean().item()
    return server


def unrolled_step(env: Environment, theta: Tensor, run: str = "learn-0") -> Tensor:
    """One outer step as the authors' code does it: a graph over all rounds, detached local gradients, one backward.

    Every minibatch's loss is added up with the graph that leads through the aggregated models back to Θ; the local
    gradient of the same loss is taken on the way and detached. Gives dL/dθ.
    """
    data, module = env.load(), model(env, run)
    theta = theta.clone().requires_grad_()
    weights = (theta.square() / theta.square().sum(1, keepdim=True)).float()
    shared = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    total = torch.zeros(())
    for t in range(env.rounds):
        mixed: dict[str, Tensor] = {}
        for k in range(len(data.keys)):
            local = dict(shared)
            for x, y in minibatches(env, k, run, t):
                loss = cross_entropy(functional_call(module, local, (x,)), y)
                gradients = torch.autograd.grad(loss, list(local.values()), retain_graph=True)
                total = total + loss
                local = {name: p - env.lr * g for (name, p), g in zip(local.items(), gradients, strict=True)}
            for name, p in local.items():
                part = weights[t, k] * p
                mixed[name] = mixed[name] + part if name in mixed else part
        shared = mixed
    for k in range(len(data.keys)):
        for x, y in minibatches(env, k, run, env.rounds):
            total = total + cross_entropy(functional_call(module, shared, (x,)), y)
    return torch.autograd.grad(total, theta)[0]


def model(env: Environment, run: str) -> nn.Module:
    """The initial model of a run."""
    data = env.load()
    return seeded(model_factory(env.model, tuple(data.x.shape[1:]), data.classes), env.seed, run)


def minibatches(env: Environment, k: int, run: str, t: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Client k's minibatches of a round, the very ones that the engine takes."""
    data, draw = env.load(), RoundRng(env.seed, run, t)
    rows = slice(data.offsets[k], data.offsets[k + 1])
    x, y = data.x[rows], data.y[rows]
    for epoch in range(env.epochs(k, t)):
        shuffled = torch.from_numpy(draw.permutation(data.keys[k], epoch, len(y)))
        for batch in torch.split(shuffled, env.batch_size):
            yield x[batch], y[batch]
