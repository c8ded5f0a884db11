"""The fast kernel: a stack of linear layers with ReLU between, all client slots in batched products.

Forward, with a_0 = x:       z_l = a_{l−1} W_lᵀ + b_l,   a_l = relu(z_l)
Backward from δ = ∂L/∂z:     δ_{l−1} = (δ_l W_l) ⊙ [a_{l−1} > 0],   ∂L/∂W_l = δ_lᵀ a_{l−1},   ∂L/∂b_l = Σ δ_l

The Hessian-vector product is Pearlmutter's: the tangent (V_l, v_l) runs forward beside the activations,

    ż_l = ȧ_{l−1} W_lᵀ + a_{l−1} V_lᵀ + v_l,   ȧ_l = ż_l ⊙ [a_l > 0],

and backward, where the outer slope ε and the curvature term travel as one chain γ = ε − δ̇:

    γ_L = ε − u (diag(s) − s sᵀ) ż_L,   γ_{l−1} = (γ_l W_l − δ_l V_l) ⊙ [a_{l−1} > 0]
    V_l ← V_l + γ_lᵀ a_{l−1} − δ_lᵀ ȧ_{l−1},    v_l ← v_l + Σ γ_l

so the outer gradient costs no product of its own.
"""

import torch
from torch import Tensor, nn

from fedunfold.core.params import ParamLayout
from fedunfold.core.task import Task
from fedunfold.engines.simulation.kernels.base import Batch, OuterSlope, Parameters, Pullback
from fedunfold.tasks.cross_entropy import cross_entropy, softmax_jacobian_product

Layer = tuple[Tensor, Tensor | None]


class MLPKernel:
    """Kernel for [Flatten] Linear (ReLU Linear)*, with or without biases, and the cross-entropy of its logits.

    Attributes:
        biased: Of every layer, whether it has a bias.
        sizes: The number of features, and that of the units of every layer.
    """

    is_stochastic = False
    min_batch_size = 1

    def __init__(self, module: nn.Module, task: Task) -> None:
        self.task = task
        layers = [layer for layer in module.children() if isinstance(layer, nn.Linear)]
        self.biased = [layer.bias is not None for layer in layers]
        self.sizes = layers[0].in_features, *(layer.out_features for layer in layers)
        self.layout = ParamLayout.of(module)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether the module is such a stack and nothing more: no `forward` of its own, no layer or
        parameter used twice, no hooks, nothing frozen."""
        if type(module) is not nn.Sequential or not all(p.requires_grad for p in module.parameters()):
            return False
        layers = list(module)
        parameters = [p for layer in layers for p in layer.parameters()]
        if len({id(p) for p in parameters}) < len(parameters) or any(map(_hooked, module.modules())):
            return False
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers = layers[1:]
        kinds: list[type] = [type(layer) for layer in layers]
        return kinds == [nn.Linear, *[nn.ReLU, nn.Linear] * (len(kinds) // 2)]

    def outputs(self, parameters: Parameters, batch: Batch) -> Tensor:
        return self._forward(self._layers(parameters), batch)[1]

    def local_vjp(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Pullback]:
        layers = self._layers(parameters)
        activations, logits = self._forward(layers, batch)

        def pullback(slope: Tensor, into: Parameters) -> None:
            slopes = [slope]
            for (weight, _), activation in zip(layers[:0:-1], activations[:0:-1], strict=True):
                slopes.append(_masked(torch.bmm(slopes[-1], weight), activation))
            # Only now may `into` change: it can be the very weights the chain above went through.
            targets = self._layers(into)
            for (weight, bias), activation, delta in zip(targets, activations, reversed(slopes), strict=True):
                weight.baddbmm_(delta.mT, activation)
                if bias is not None:
                    bias.add_(delta.sum(1))

        return logits, pullback

    def apply_hvp_(
        self, parameters: Parameters, adjoint: Parameters, batch: Batch, curvature: Tensor, outer_slope: OuterSlope
    ) -> None:
        layers, tangents = self._layers(parameters), self._layers(adjoint)
        activations, logits = self._forward(layers, batch)

        moved: list[Tensor | None] = [None]
        for index, ((weight, _), (direction, shift)) in enumerate(zip(layers, tangents, strict=True)):
            change = _affine(activations[index], direction, shift)
            below = moved[-1]
            if below is not None:
                change.baddbmm_(below, weight.mT)
            last = index == len(layers) - 1
            moved.append(change if last else _masked(change, activations[index + 1]))
        logit_change = moved.pop()
        assert logit_change is not None

        _, slope = cross_entropy(logits, batch.y)
        chain = softmax_jacobian_product(torch.softmax(logits, -1), logit_change).mul_(-curvature.unsqueeze(-1))
        if outer_slope is not None:
            chain += outer_slope(logits)
        slope.mul_(curvature.unsqueeze(-1))

        for index in range(len(layers) - 1, -1, -1):
            (weight, _), (direction, shift) = layers[index], tangents[index]
            here, activation = (chain, slope), activations[index]
            if index > 0:
                chain = _masked(torch.bmm(chain, weight).baddbmm_(slope, direction, alpha=-1), activation)
                slope = _masked(torch.bmm(slope, weight), activation)
            direction.baddbmm_(here[0].mT, activation)
            change_below = moved[index]
            if change_below is not None:
                direction.baddbmm_(here[1].mT, change_below, alpha=-1)
            if shift is not None:
                shift.add_(here[0].sum(1))

    def _layers(self, parameters: Parameters) -> list[Layer]:
        flat = iter(parameters)
        return [(next(flat), next(flat) if biased else None) for biased in self.biased]

    def _forward(self, layers: list[Layer], batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Inputs of every layer, and the logits."""
        assert isinstance(batch.x, Tensor)
        activations = [batch.x.flatten(2)]
        for weight, bias in layers[:-1]:
            activations.append(_affine(activations[-1], weight, bias).relu_())
        return activations, _affine(activations[-1], *layers[-1])


def _hooked(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _masked(values: Tensor, activation: Tensor) -> Tensor:
    """values ⊙ [activation > 0], in one pass."""
    masked: Tensor = torch.ops.aten.threshold_backward(values, activation, 0)
    return masked


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in every slot."""
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
