"""The general kernel: any `torch.nn.Module` that maps [B, …] to logits [B, C].

Lanes are taken one after the other with their real rows only, so layers that look across a minibatch see
what a client by itself would see. Derivatives come from autograd over one minibatch; no graph outlives it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedunfold.simulation.kernel import Batch, Parameters, Pullback


class AnyModule:
    """Kernel that runs the module itself, lane by lane."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = list(trainable)
        self.shapes = tuple(p.shape for p in trainable.values())

    @torch.no_grad()
    def logits(self, parameters: Parameters, batch: Batch) -> Tensor:
        return _padded([self._logits(leaves, x) for leaves, x, _ in self._lanes(parameters, batch)], batch)

    @torch.enable_grad()
    def linearize(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Pullback]:
        lanes = [(leaves, self._logits(leaves, x)) for leaves, x, _ in self._lanes(parameters, batch)]
        logits = _padded([out for _, out in lanes], batch)

        def pullback(slope: Tensor, into: Parameters) -> None:
            # All lanes are pulled back before any is changed: `into` may be what the leaves view.
            gradients = [
                torch.autograd.grad(out, leaves, slope[lane, : len(out)], retain_graph=True, materialize_grads=True)
                for lane, (leaves, out) in enumerate(lanes)
            ]
            for lane, gradient in enumerate(gradients):
                for target, part in zip(into, gradient, strict=True):
                    target[lane] += part

        return logits, pullback

    @torch.enable_grad()
    def pull_adjoint_(
        self,
        parameters: Parameters,
        adjoint: Parameters,
        batch: Batch,
        curvature: Tensor,
        outer_slope: Callable[[Tensor], Tensor] | None,
    ) -> None:
        lanes = []
        for lane, (leaves, x, y) in enumerate(self._lanes(parameters, batch)):
            logits = self._logits(leaves, x)
            losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
            gradient = torch.autograd.grad(
                losses @ curvature[lane, : len(y)], leaves, create_graph=True, materialize_grads=True
            )
            lanes.append((leaves, logits, gradient))
        slopes = None if outer_slope is None else outer_slope(_padded([out for _, out, _ in lanes], batch))
        for lane, (leaves, logits, gradient) in enumerate(lanes):
            along = torch.stack([(g * p[lane]).sum() for g, p in zip(gradient, adjoint, strict=True)]).sum()
            curved = torch.autograd.grad(along, leaves, retain_graph=slopes is not None, materialize_grads=True)
            for target, part in zip(adjoint, curved, strict=True):
                target[lane] -= part
            if slopes is not None:
                direct = torch.autograd.grad(logits, leaves, slopes[lane, : len(logits)], materialize_grads=True)
                for target, part in zip(adjoint, direct, strict=True):
                    target[lane] += part

    def _lanes(self, parameters: Parameters, batch: Batch) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
        """Each lane's parameters as leaves of a graph of its own, with its real rows."""
        for lane, count in enumerate(batch.counts):
            leaves = [p[lane].detach().requires_grad_() for p in parameters]
            yield leaves, batch.x[lane, :count], batch.y[lane, :count]

    def _logits(self, leaves: list[Tensor], x: Tensor) -> Tensor:
        logits: Tensor = functional_call(self._module, dict(zip(self._names, leaves, strict=True)), (x,))
        return logits


def _padded(rows: list[Tensor], batch: Batch) -> Tensor:
    """Logits of all lanes in one tensor, zeros where a minibatch is short."""
    out = rows[0].new_zeros(*batch.y.shape, rows[0].shape[-1])
    for lane, real in enumerate(rows):
        out[lane, : len(real)] = real.detach()
    return out
