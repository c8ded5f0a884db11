"""The general kernel: any `torch.nn.Module` and any task.

Slots are taken one after the other with their real rows only, so layers that look across a minibatch see
what a client by itself would see. Derivatives come from autograd over one minibatch; no graph outlives it.

In training, dropout draws by the slot's seed, and normalisation layers take the minibatch's statistics and move their
running ones, which travel with the parameters. Where the model only reads, nothing is drawn and the running ones count.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout
from fedunfold.core.task import Task
from fedunfold.data.arrays import Inputs, map_inputs, take
from fedunfold.engines.simulation.kernels.base import Batch, OuterSlope, Parameters, Pullback
from fedunfold.engines.simulation.kernels.dropout import seed_dropout


class ModuleKernel:
    """Kernel that runs the module itself, slot by slot; it is tried on inputs x first."""

    is_stochastic = True

    def __init__(self, module: nn.Module, task: Task, x: Inputs) -> None:
        self.task = task
        self._generator = torch.Generator()
        seed_dropout(module, self._generator)
        self._module = module
        self._is_recurrent = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
        self.layout = layout = ParamLayout.of(module)
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        leaves, running = ([held[name].detach() for name in names] for names in (layout.names, layout.buffer_names))
        two = map_inputs(lambda t: t.expand(2, *t.shape[1:]) if len(t) == 1 else t, x)
        tried = _Slot(leaves, running, two, torch.empty(0), seed=0)
        self._check_training(tried)
        self.min_batch_size = self._fewest_rows(tried)

    @torch.no_grad()
    def outputs(self, parameters: Parameters, batch: Batch) -> Tensor:
        return _padded([self._outputs(slot) for slot in self._slots(parameters, batch)], batch)

    @torch.enable_grad()
    def local_vjp(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Pullback]:
        slots = []
        for index, slot in enumerate(self._slots(parameters, batch)):
            slots.append((slot.leaves, self._outputs(slot)))
            for kept, moved in zip(parameters[len(self.layout.shapes) :], slot.running, strict=True):
                kept[index] = moved
        outputs = _padded([out for _, out in slots], batch)

        def pullback(slope: Tensor, into: Parameters) -> None:
            # All slots are pulled back before any is changed: `into` may be what the leaves view.
            gradients = [
                torch.autograd.grad(out, leaves, slope[slot, : len(out)], retain_graph=True, materialize_grads=True)
                for slot, (leaves, out) in enumerate(slots)
            ]
            for slot, gradient in enumerate(gradients):
                for target, part in zip(into[: len(gradient)], gradient, strict=True):
                    target[slot] += part

        return outputs, pullback

    @torch.enable_grad()
    @torch.backends.cudnn.flags(enabled=False)  # whose recurrent layers have no second derivative
    @sdpa_kernel(SDPBackend.MATH)  # nor has any other attention
    def apply_hvp_(
        self, parameters: Parameters, adjoint: Parameters, batch: Batch, curvature: Tensor, outer_slope: OuterSlope
    ) -> None:
        slots = []
        adjoint = adjoint[: len(self.layout.shapes)]  # running statistics have none
        for index, slot in enumerate(self._slots(parameters, batch)):
            outputs = self._outputs(slot)
            losses = self.task.losses(outputs, slot.y)
            gradient = torch.autograd.grad(
                losses @ curvature[index, : len(slot.y)], slot.leaves, create_graph=True, materialize_grads=True
            )
            slots.append((slot.leaves, outputs, gradient))
        slopes = None if outer_slope is None else outer_slope(_padded([out for _, out, _ in slots], batch))
        for index, (leaves, outputs, gradient) in enumerate(slots):
            along = torch.stack([(g * p[index]).sum() for g, p in zip(gradient, adjoint, strict=True)]).sum()
            if along.requires_grad:  # a linear model under a loss of straight pieces has no curvature
                curved = torch.autograd.grad(along, leaves, retain_graph=slopes is not None, materialize_grads=True)
                for target, part in zip(adjoint, curved, strict=True):
                    target[index] -= part
            if slopes is not None:
                direct = torch.autograd.grad(outputs, leaves, slopes[index, : len(outputs)], materialize_grads=True)
                for target, part in zip(adjoint, direct, strict=True):
                    target[index] += part

    def _slots(self, parameters: Parameters, batch: Batch) -> "Iterator[_Slot]":
        trained = len(self.layout.shapes)
        for slot, count in enumerate(batch.counts):
            yield _Slot(
                [p[slot].detach().requires_grad_() for p in parameters[:trained]],
                [p[slot].detach().clone() for p in parameters[trained:]],
                take(batch.x, (slot, slice(count))),
                batch.y[slot, :count],
                None if batch.seeds is None else batch.seeds[slot],
            )

    def _outputs(self, slot: "_Slot") -> Tensor:
        """The outputs of a slot; in training its running statistics are moved."""
        self._module.train(slot.seed is not None)
        if slot.seed is not None:
            self._generator.manual_seed(slot.seed)
        held = dict(zip(self.layout.names + self.layout.buffer_names, slot.leaves + slot.running, strict=True))
        args, kwargs = ((slot.x,), {}) if isinstance(slot.x, Tensor) else ((), dict(slot.x))
        # cuDNN has no derivative of recurrent layers that only read.
        without_cudnn = self._is_recurrent and slot.seed is None and torch.is_grad_enabled()
        with torch.backends.cudnn.flags(enabled=False) if without_cudnn else nullcontext():
            outputs: Tensor = functional_call(self._module, held, args, kwargs)
        return outputs.to(slot.leaves[0].dtype)  # a frozen base may compute in another

    def _check_training(self, slot: "_Slot") -> None:
        """Refuse a module whose steps cannot be made again: they may depend on nothing but parameters and seeds."""
        for name, layer in self._module.named_modules():
            if getattr(layer, "running_mean", None) is not None and layer.momentum is None:
                raise InputError(f"layer '{name}' ({type(layer).__name__}) has no momentum; give it one, such as 0.1.")
        kept = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        first, second = self._tried(slot), self._tried(slot)
        if not torch.equal(first, second):
            raise InputError(
                "the model gives other outputs for the same rows each time it is trained; let it draw by nn.Dropout."
            )
        for name, buffer in self._module.named_buffers():
            counts_minibatches = name.endswith("num_batches_tracked")
            if name not in self.layout.buffer_names and not counts_minibatches and not torch.equal(buffer, kept[name]):
                raise InputError(f"the model changes its buffer '{name}' when it is run; only running statistics may.")

    def _fewest_rows(self, slot: "_Slot") -> int:
        """2 where the model cannot be trained on a single row, as with BatchNorm after a linear layer."""
        try:
            self._tried(replace(slot, x=take(slot.x, slice(1))))
        except ValueError:
            return 2
        return 1

    @torch.no_grad()
    def _tried(self, slot: "_Slot") -> Tensor:
        return self._outputs(replace(slot, running=[buffer.clone() for buffer in slot.running]))


@dataclass(frozen=True)
class _Slot:
    """A slot's parameters as leaves of a graph of its own, its running statistics, its real rows and its seed."""

    leaves: list[Tensor]
    running: list[Tensor]
    x: Inputs
    y: Tensor
    seed: int | None


def _padded(rows: list[Tensor], batch: Batch) -> Tensor:
    """Outputs of all slots in one tensor, zeros where a minibatch is short."""
    out = rows[0].new_zeros(*batch.y.shape[:2], *rows[0].shape[1:])
    for slot, real in enumerate(rows):
        out[slot, : len(real)] = real.detach()
    return out
