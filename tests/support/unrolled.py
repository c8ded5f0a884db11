"""The unfolded run written out in plain PyTorch, as one autograd graph over all rounds and local steps.

Slow and simple on purpose: it shares with the package only the draws of minibatches, participation and dropout, and is
what every gradient is checked against. Local and server optimisers of others are taken as they are, and differentiated
by autograd through all of their steps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedunfold import local, server
from fedunfold.config import Environment
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.messages import Metric
from fedunfold.core.params import ParamLayout
from fedunfold.core.participation import RoundRng, epochs_at
from fedunfold.core.parts import LocalOptimizer, State
from fedunfold.data.arrays import Inputs, cast, take
from fedunfold.data.datasets import DatasetRows
from fedunfold.data.federated import FederatedData
from fedunfold.engines.simulation.kernels.dropout import seed_dropout
from tests.support.federations import participation


class Unrolled:
    """L(θ, s) of an environment, differentiable by autograd."""

    squares = True
    """Whether weights are the squares of a table's entries, or the entries themselves."""
    momenta: Tensor | None = None
    trusts: Tensor | None = None
    scales: Tensor | None = None
    """β, a and the model's scale of every round, [T]."""
    rejected: frozenset[tuple[int, int]] = frozenset()
    """(t, k) of clients that train in a round of which nothing is used."""
    reported: Sequence[Mapping[Metric, Tensor]] = ()
    """What clients had last reported before every round, where the client sampler reads it; a constant."""

    def __init__(
        self,
        env: Environment,
        module: nn.Module,
        algorithm: Algorithm,
        outer: str,
        first_order: bool,
        losses: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        self.env, self.algorithm, self.outer, self.first_order = env, algorithm, outer, first_order
        self.data: FederatedData = env.load()
        self.module, self.generator = module.double(), torch.Generator()
        seed_dropout(self.module, self.generator)
        layout = ParamLayout.of(module)
        self.names, self.running = list(layout.names), list(layout.buffer_names)
        self.shapes, self.trained = [*layout.shapes, *layout.buffer_shapes], layout.num_params
        self.losses = losses or partial(nn.functional.cross_entropy, reduction="none")
        counts = self.data.label_counts.sum(0).double()
        self.class_weights = counts.sum() / (len(counts) * counts)

    def logits(self, w: Tensor, x: Inputs, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """In training, which has a seed, or not; and the running statistics afterwards, which have no gradient."""
        w = torch.cat([w[: self.trained], w[self.trained :].detach()])
        pieces = torch.split(w, [shape.numel() for shape in self.shapes])
        values = {n: p.view(s) for n, p, s in zip(self.names + self.running, pieces, self.shapes, strict=True)}
        values |= {name: values[name].detach().clone() for name in self.running}
        self.module.train(seed is not None)
        if seed is not None:
            self.generator.manual_seed(seed)
        args, kwargs = ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
        out: Tensor = functional_call(self.module, values, args, kwargs)
        return out, torch.cat([w.new_empty(0), *(values[name].flatten() for name in self.running)])

    def outer_loss(self, w: Tensor, x: Inputs, y: Tensor, epochs: int, seed: int | None = None) -> Tensor:
        z, _ = self.logits(w, x, seed)
        if self.outer == "path":
            return self.losses(z, y).mean()
        if self.outer == "mse":
            return nn.functional.mse_loss(z.softmax(1), nn.functional.one_hot(y, z.shape[1]).double())
        losses = self.losses(z, y)
        if self.outer.endswith(("balanced", "every-round")) and len(self.class_weights) > 1:
            losses = losses * self.class_weights[y]
        return losses.sum() / len(y) / epochs

    @property
    def between_rounds(self) -> bool:
        return self.outer.startswith("final") or self.outer == "every-round"

    def evaluation(self, w: Tensor, run: str, t: int) -> Tensor:
        """All clients' outer loss at w^(t)."""
        total = torch.zeros((), dtype=torch.float64)
        for k in range(len(self.data.keys)):
            for x, y in self.batches(run, t, k):
                total = total + self.outer_loss(w, x, y, self.epochs(k, t))
        return total

    def epochs(self, k: int, t: int) -> int:
        return epochs_at(self.env.clients[k].epochs, t)

    def batches(self, run: str, t: int, k: int) -> list[tuple[Inputs, Tensor]]:
        own = slice(self.data.offsets[k], self.data.offsets[k + 1])
        assert not isinstance(self.data.inputs, DatasetRows)
        x, y = take(self.data.inputs, own), self.data.y[own].clone()
        out = []
        for epoch in range(self.epochs(k, t)):
            order = RoundRng(self.env.seed, run, t).permutation(self.data.keys[k], epoch, len(y))
            for begin in range(0, len(y), self.env.batch_size):
                rows = torch.from_numpy(order[begin : begin + self.env.batch_size])
                out.append((cast(take(x, rows), y.device, torch.float64), y[rows]))
        return out

    def local_scale(self, k: int, steps: list[int], cohort: np.ndarray) -> float:
        """τ_eff/‖a_k‖₁, τ_eff being over the cohort; `steps` are τ_l of all clients, 0 for absent ones."""
        base, lr = getattr(self.algorithm.local, "base", self.algorithm.local), self.env.lr
        mu, rho = getattr(base, "mu", 0.0), getattr(base, "rho", 0.0)
        norms = [sum((1 - lr * mu) ** i * (1 - rho ** (i + 1)) / (1 - rho) for i in range(n)) for n in steps]
        sizes = np.where(cohort, self.data.sizes, 0)
        return float(sum(size / sizes.sum() * norm for size, norm in zip(sizes, norms, strict=True)) / norms[k])

    def local_step(self, w: Tensor, gradient: Tensor, state: State, lr: float, start: Tensor) -> tuple[Tensor, State]:
        chosen = self.algorithm.local
        base = chosen.base if isinstance(chosen, local.accumulated) else chosen
        if isinstance(base, local.sgd):  # nova's steps are these too
            return w - lr * gradient, ()
        if isinstance(base, local.prox):
            return w - lr * (gradient + base.mu * (w - start)), ()
        if isinstance(base, local.scaffold):
            return w - lr * (gradient + state[0]), state
        if isinstance(base, local.feddyn):
            return w - lr * (gradient + state[0] + base.alpha * (w - start)), state
        if isinstance(base, local.momentum):
            v = gradient if not state else base.rho * state[0] + gradient
            return w - lr * v, (v,)
        state = state or base.init(start[None])
        after, state = base.step(w[None], gradient[None], state, w.new_full((1, 1), lr), start[None])
        return after[0], state

    def train(
        self, w: Tensor, t: int, k: int, run: str, scale: float, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(w_k, its outer loss along the path)."""
        inside = scale if self.algorithm.local.name == "nova" else 1.0
        state: State = () if correction is None else (correction,)
        wk, loss, start = w, torch.zeros((), dtype=torch.float64), w[: self.trained]
        for step, (x, y) in enumerate(self.batches(run, t, k)):
            seed = RoundRng(self.env.seed, run, t).noise_seed(self.data.keys[k], step)
            if not self.between_rounds:
                loss = loss + self.outer_loss(wk, x, y, self.epochs(k, t), seed)
            with torch.enable_grad():
                point = wk if wk.requires_grad else wk.detach().requires_grad_()
                z, moved = self.logits(point, x, seed)
                gradient = torch.autograd.grad(self.losses(z, y).mean(), point, create_graph=True)[0]
            if self.first_order:
                gradient = gradient.detach()
            params, gradient = wk[: self.trained], gradient[: self.trained]
            params, state = self.local_step(params, gradient, state, self.env.lr * inside, start)
            wk = self.with_buffers(params, moved)
        accumulates = self.algorithm.local.name.startswith("accumulated")
        return (self.with_buffers(w + scale * (wk - w), wk[self.trained :]) if accumulates else wk), loss

    def with_buffers(self, w: Tensor, running: Tensor) -> Tensor:
        """What is trained of w, with other running statistics."""
        return torch.cat([w[: self.trained], running.detach()])

    def __call__(self, theta: Tensor, step_sizes: Tensor, w: Tensor, run: str) -> Tensor:
        w = w.clone().requires_grad_()
        clients, absent = range(len(self.data.keys)), self.algorithm.absent
        total = torch.zeros((), dtype=torch.float64)
        memory: dict[int, Tensor] = {}
        state: State = ()
        last = torch.zeros_like(w)
        controls = Controls(self.algorithm.local, len(self.data.keys), self.trained, self.env.lr)
        for t, row in enumerate(theta):
            if self.outer == "every-round" and t > 0:
                total = total + self.evaluation(w, run, t)
            taking_part = participation(self.env, run, t, self.reported[t] if self.reported else None)
            here, cohort = taking_part.participating, taking_part.cohort
            steps = [len(self.batches(run, t, k)) if here[k] else 0 for k in clients]
            deltas: dict[int, Tensor] = {}
            for k in clients:
                if (t, k) in self.rejected:
                    continue
                if here[k]:
                    wk, loss = self.train(w, t, k, run, self.local_scale(k, steps, cohort), controls.correction(k))
                    total = total + loss
                    deltas[k] = wk - w
                elif cohort[k] and self.algorithm.absent_loss == "evaluate" and not self.between_rounds:
                    for x, y in self.batches(run, t, k):
                        total = total + self.outer_loss(w, x, y, self.epochs(k, t))
            squares, fresh = row**2 if self.squares else row, dict(deltas)
            if absent == "drop" and not deltas:
                continue
            if absent == "remember":
                memory.update({k: self.with_buffers(d, 0 * d[self.trained :]) for k, d in deltas.items()})
                deltas = memory
            among = [k for k in clients if k in deltas or (cohort[k] and absent != "drop")]
            norm = torch.stack([squares[k] for k in among]).sum()
            u = torch.zeros_like(w)
            for k, delta in deltas.items():
                u = u + squares[k] / norm * delta
            mean = w[self.trained :] + sum(squares[k] / norm * d[self.trained :] for k, d in fresh.items())
            last = step_sizes[t] * u if self.momenta is None else step_sizes[t] * u + self.momenta[t] * last
            stepped, state = self.server_step(w, last, state, [d.detach() for d in deltas.values()])
            w = stepped if self.trusts is None else w + last + self.trusts[t] * (stepped - w - last)
            w = w if self.scales is None else self.scales[t] * w
            w = self.with_buffers(w + controls.after(fresh, steps), mean)
        return total + self.evaluation(w, run, len(theta))

    def shrunk(self, w: Tensor, u: Tensor, deltas: list[Tensor]) -> Tensor:
        """FedLWS's step, layer by layer; how far updates lie apart is a constant."""
        s, done, begin = self.algorithm.server, [], 0
        assert isinstance(s, server.fedlws)
        modules = [name.rpartition(".")[0] for name in self.names]
        for module in dict.fromkeys(modules):
            own = [shape for name, shape in zip(modules, self.shapes, strict=False) if name == module]
            part = slice(begin, begin := begin + sum(shape.numel() for shape in own))
            mean = sum(d[part] for d in deltas) / len(deltas) if deltas else 0.0
            apart = sum(float((d[part] - mean).norm()) for d in deltas) / max(len(deltas), 1)
            tau = min(max(s.beta * apart, s.min_tau), s.max_tau)
            size = (w[part] @ w[part]).sqrt()
            pull = tau * (u[part] @ u[part]).sqrt() if u[part].any() else 0.0
            done.append(size / (size + pull) * (w[part] + u[part]))
        return torch.cat([*done, (w + u)[self.trained :]])

    def server_step(self, w: Tensor, u: Tensor, state: State, deltas: list[Tensor]) -> tuple[Tensor, State]:
        s = self.algorithm.server
        if isinstance(s, server.fedlws):
            return self.shrunk(w, u, deltas), ()
        if isinstance(s, server.sgd):
            return w + s.lr * u, ()
        if isinstance(s, server.momentum):
            m = s.beta * state[0] + u if state else u
            return w + s.lr * m, (m,)
        if type(s) is server.adam:
            m, v = state or (torch.zeros_like(w), torch.full_like(w, s.tau**2))
            m = s.beta1 * m + (1 - s.beta1) * u
            v = s.beta2 * v + (1 - s.beta2) * u**2
            return w + s.lr * m / (v.sqrt() + s.tau), (m, v)
        return s.update(w, u, state or s.init(w.detach()))


class Controls:
    """SCAFFOLD's and FedDyn's vectors, by the formulas of their papers, all of them constants."""

    def __init__(self, optimizer: LocalOptimizer, clients: int, size: int, lr: float) -> None:
        self.optimizer, self.lr = optimizer, lr
        self.shared, self.own = torch.zeros(size).double(), torch.zeros(clients, size).double()

    def correction(self, k: int) -> Tensor | None:
        if isinstance(self.optimizer, local.scaffold):
            return self.shared - self.own[k]
        return -self.own[k] if isinstance(self.optimizer, local.feddyn) else None

    def after(self, updates: dict[int, Tensor], steps: list[int]) -> Tensor | float:
        """What is added to the model after a round with these updates."""
        before, size = self.own.clone(), len(self.shared)
        for k, update in updates.items():
            moved = update[:size].detach()
            if isinstance(self.optimizer, local.scaffold):
                self.own[k] = before[k] - self.shared - moved / (self.lr * steps[k])
            elif isinstance(self.optimizer, local.feddyn):
                self.own[k] = before[k] - self.optimizer.alpha * moved
        self.shared = self.shared + (self.own - before).sum(0) / len(self.own)
        if not (updates and isinstance(self.optimizer, local.feddyn)):
            return 0.0
        update = next(iter(updates.values()))
        return torch.cat([-self.shared / self.optimizer.alpha, torch.zeros_like(update[size:])])


def gradients_of(unrolled: Unrolled, theta: Tensor, w: Tensor, run: str) -> tuple[float, Tensor, Tensor]:
    """(L, dL/dθ, dL/ds) by autograd."""
    theta = theta.clone().requires_grad_()
    sizes = [unrolled.algorithm.step_size(t) for t in range(len(theta))]
    step_sizes = torch.tensor(sizes, dtype=theta.dtype, requires_grad=True)
    loss = unrolled(theta, step_sizes, w, run)
    to_theta, to_steps = torch.autograd.grad(loss, (theta, step_sizes))
    return float(loss.detach()), to_theta, to_steps
