"""The unfolded run written out in plain PyTorch, as one autograd graph over all rounds and local steps.

Slow and simple on purpose: it shares with the package only the draws of minibatches, presence and dropout, and is what
every gradient is checked against.
"""

import numpy as np
import torch
from fedunfold.engines.simulation.schedule import RoundRng
from torch import Tensor, nn
from torch.func import functional_call

from fedunfold.config import Environment
from fedunfold.core.params import statistics
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.kernels.dropout import seed_dropout
from fedunfold.training.loop import Algorithm


class Unrolled:
    """L(θ, s) of an environment, differentiable by autograd."""

    screened: frozenset[tuple[int, int]] = frozenset()
    """(t, k) of clients that train in a round of which nothing is used."""

    def __init__(self, env: Environment, module: nn.Module, algorithm: Algorithm, outer: str, first_order: bool):
        self.env, self.algorithm, self.outer, self.first_order = env, algorithm, outer, first_order
        self.data: FederatedData = env.load()
        self.module, self.generator = module.double(), torch.Generator()
        seed_dropout(self.module, self.generator)
        self.names, self.running = [name for name, _ in module.named_parameters()], list(statistics(module))
        self.shapes = [p.shape for p in (*module.parameters(), *statistics(module).values())]
        self.trained = sum(p.numel() for p in module.parameters())
        counts = self.data.label_counts.sum(0).double()
        self.class_weights = counts.sum() / (len(counts) * counts)

    def logits(self, w: Tensor, x: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """In training, which has a seed, or not; and the running statistics afterwards, which have no gradient."""
        w = torch.cat([w[: self.trained], w[self.trained :].detach()])
        pieces = torch.split(w, [shape.numel() for shape in self.shapes])
        values = {n: p.view(s) for n, p, s in zip(self.names + self.running, pieces, self.shapes, strict=True)}
        values |= {name: values[name].detach().clone() for name in self.running}
        self.module.train(seed is not None)
        if seed is not None:
            self.generator.manual_seed(seed)
        out: Tensor = functional_call(self.module, values, (x,))
        return out, torch.cat([w.new_empty(0), *(values[name].flatten() for name in self.running)])

    def outer_loss(self, w: Tensor, x: Tensor, y: Tensor, epochs: int, seed: int | None = None) -> Tensor:
        z, _ = self.logits(w, x, seed)
        if self.outer == "path":
            return nn.functional.cross_entropy(z, y)
        if self.outer == "mse":
            return nn.functional.mse_loss(z.softmax(1), nn.functional.one_hot(y, z.shape[1]).double())
        losses = nn.functional.cross_entropy(z, y, reduction="none")
        if self.outer.endswith("balanced"):
            losses = losses * self.class_weights[y]
        return losses.sum() / len(y) / epochs

    def batches(self, run: str, t: int, k: int) -> list[tuple[Tensor, Tensor]]:
        x, y = (part.clone() for part in self.data.client(k))
        out = []
        for epoch in range(self.env.epochs(k, t)):
            order = RoundRng(self.env.seed, run, t).permutation(self.data.keys[k], epoch, len(y))
            for begin in range(0, len(y), self.env.batch_size):
                rows = torch.from_numpy(order[begin : begin + self.env.batch_size])
                out.append((x[rows].double(), y[rows]))
        return out

    def present(self, run: str, t: int) -> np.ndarray:
        participation_probability = [client.participation_probability for client in self.env.clients]
        return RoundRng(self.env.seed, run, t).present(
            self.data.keys, participation_probability, self.env.clients_per_round
        )

    def local(self, w: Tensor, t: int, k: int, run: str, steps: list[int]) -> tuple[Tensor, Tensor]:
        """(w_k, its outer loss along the way); `steps` are τ_l of all clients, 0 for absent ones."""
        update, lr = self.algorithm.update, self.env.lr
        sizes = np.array(self.data.sizes)
        norms = [sum((1 - lr * update.mu) ** i for i in range(n)) for n in steps]
        tau_eff = sum(size / sizes.sum() * norm for size, norm in zip(sizes, norms, strict=True))
        scale = tau_eff / norms[k]
        c = scale if update.normalise_steps else 1.0
        wk, loss = w, torch.zeros((), dtype=torch.float64)
        for step, (x, y) in enumerate(self.batches(run, t, k)):
            seed = RoundRng(self.env.seed, run, t).noise(self.data.keys[k], step)
            if not self.outer.startswith("final"):
                loss = loss + self.outer_loss(wk, x, y, self.env.epochs(k, t), seed)
            with torch.enable_grad():
                point = wk if wk.requires_grad else wk.detach().requires_grad_()
                z, moved = self.logits(point, x, seed)
                gradient = torch.autograd.grad(nn.functional.cross_entropy(z, y), point, create_graph=True)[0]
            if self.first_order:
                gradient = gradient.detach()
            wk = self.trained_part(wk - lr * c * (gradient + update.mu * (wk - w)), moved)
        return (self.trained_part(w + scale * (wk - w), wk[self.trained :]) if update.accumulate else wk), loss

    def trained_part(self, w: Tensor, running: Tensor) -> Tensor:
        """What is trained of w, with other running statistics."""
        return torch.cat([w[: self.trained], running.detach()])

    def __call__(self, theta: Tensor, step_sizes: Tensor, w: Tensor, run: str) -> Tensor:
        w = w.clone().requires_grad_()
        clients = range(len(self.data.keys))
        total = torch.zeros((), dtype=torch.float64)
        memory: dict[int, Tensor] = {}
        m, v = torch.zeros_like(w), torch.full_like(w, self.algorithm.server.tau**2)
        for t, row in enumerate(theta):
            there = self.present(run, t)
            steps = [len(self.batches(run, t, k)) if there[k] else 0 for k in clients]
            deltas: dict[int, Tensor] = {}
            for k in clients:
                if (t, k) in self.screened:
                    continue
                if there[k]:
                    wk, loss = self.local(w, t, k, run, steps)
                    total = total + loss
                    deltas[k] = wk - w
                elif self.algorithm.absent_loss == "evaluate" and not self.outer.startswith("final"):
                    for x, y in self.batches(run, t, k):
                        total = total + self.outer_loss(w, x, y, self.env.epochs(k, t))
            squares, fresh = row**2, dict(deltas)
            if self.algorithm.absent == "drop":
                if not deltas:
                    continue
                norm = torch.stack([squares[k] for k in deltas]).sum()
            else:
                norm = squares.sum()
            if self.algorithm.absent == "remember":
                memory.update({k: self.trained_part(d, 0 * d[self.trained :]) for k, d in deltas.items()})
                deltas = memory
            u = torch.zeros_like(w)
            for k, delta in deltas.items():
                u = u + squares[k] / norm * delta
            mean = w[self.trained :] + sum(squares[k] / norm * d[self.trained :] for k, d in fresh.items())
            w, m, v = self.server(w, step_sizes[t] * u, m, v)
            w = self.trained_part(w, mean)
        for k in clients:
            for x, y in self.batches(run, len(theta), k):
                total = total + self.outer_loss(w, x, y, self.env.epochs(k, len(theta)))
        return total

    def server(self, w: Tensor, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.algorithm.server
        if s.name == "plain":
            return w + u, m, v
        if s.name == "momentum":
            m = s.beta1 * m + u
            return w + s.lr * m, m, v
        m = s.beta1 * m + (1 - s.beta1) * u
        v = s.beta2 * v + (1 - s.beta2) * u**2
        return w + s.lr * m / (v.sqrt() + s.tau), m, v


def gradients_of(unrolled: Unrolled, theta: Tensor, w: Tensor, run: str) -> tuple[float, Tensor, Tensor]:
    """(L, dL/dθ, dL/ds) by autograd."""
    theta = theta.clone().requires_grad_()
    sizes = [unrolled.algorithm.step_size(t) for t in range(len(theta))]
    step_sizes = torch.tensor(sizes, dtype=theta.dtype, requires_grad=True)
    loss = unrolled(theta, step_sizes, w, run)
    to_theta, to_steps = torch.autograd.grad(loss, (theta, step_sizes))
    return float(loss.detach()), to_theta, to_steps
