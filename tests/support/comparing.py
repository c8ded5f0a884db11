"""Local training in one call or launch against the reference by torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.config.model import ModelSpec
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.participation import RoundRng
from fedunfold.core.parts import OUTER_LOSSES, LocalOptimizer
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.engines.simulation.backends.base import DeviceBatchPlan, OuterWeights, StepSums
from fedunfold.engines.simulation.backends.cpu.local_training import CpuTrainer
from fedunfold.engines.simulation.backends.cuda.local_training import CudaTrainer
from fedunfold.engines.simulation.backends.torch.local_training import TorchTrainer
from fedunfold.engines.simulation.batching import ClientSlice, MemorySamples, plan_batches
from fedunfold.engines.simulation.kernels.mlp import MLPKernel
from fedunfold.local import nova, prox, sgd
from fedunfold.rules.size import size
from fedunfold.tasks import classification
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad

SLICES = [
    ClientSlice("a", 0, 40, 1),
    ClientSlice("b", 40, 14, 1),
    ClientSlice("c", 54, 19, 2),
]  # minibatches of 18, 14, 4 and 1
SLOTS, ROWS, BATCH = len(SLICES), 73, 18
CPU = torch.device("cpu")
Parts = tuple[MLPKernel, Tensor, DeviceBatchPlan, Tensor, LocalOptimizer, OuterWeights | None, Tensor]

CASES = [
    pytest.param((20, 5), sgd(), None, id="one layer"),
    pytest.param((37, 11), sgd(), "balanced", id="one layer, balanced"),
    pytest.param((21, 5), prox(0.3), "path", id="one layer, prox"),
    pytest.param((20, 5), sgd(), "final", id="one layer, final"),
    pytest.param((20, 33, 5), sgd(), "balanced", id="two layers, balanced"),
    pytest.param((30, 20, 40), prox(0.3), "path", id="two layers, prox, many classes"),
    pytest.param((70, 40, 24, 5), sgd(), "sample", id="three layers, sample"),
    pytest.param((25, 13, 17, 6), prox(0.3), "balanced", id="three layers, prox, balanced"),
    pytest.param((5, 130), sgd(), "path", id="one layer, few features, many classes"),
    pytest.param((6, 3, 2, 131), sgd(), "path", id="three layers, few units, many classes"),
]


def stack(sides: Sequence[int]) -> MLPKernel:
    layers: list[nn.Module] = []
    for below, above in pairwise(sides):
        layers += [nn.Linear(below, above), nn.ReLU()]
    return MLPKernel(nn.Sequential(*layers[:-1]), classification(sides[-1]))


def normal_rows(features: int) -> Tensor:
    return torch.randn(ROWS, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sparse_rows(features: int) -> Tensor:
    """Rows of zeros but for some numbers, with empty rows and columns among them."""
    x = normal_rows(features).abs()
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.2] = 0
    x[7], x[:, 3] = 0, 0
    return x


def scaled_rows(features: int) -> Tensor:
    """The same, where every column was shifted and scaled: the background is no longer 0."""
    draw = torch.Generator().manual_seed(6)
    return sparse_rows(features) * torch.rand(features, generator=draw) - torch.randn(features, generator=draw).double()


@dataclass(frozen=True)
class Comparison:
    """A trainer made of `Parts`, on a device and in a precision, beside the reference in float64 on the CPU."""

    make: Callable[..., CudaTrainer | CpuTrainer]
    rows: Callable[[int], Tensor] = normal_rows
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    def check(
        self,
        sides: Sequence[int],
        update: LocalOptimizer,
        outer: str | None,
        tolerance: float,
        *,
        gradients: bool = True,
        backward: bool = True,
        spoilt: bool = False,
    ) -> None:
        """Compare models, losses, sums of gradients and the backward pass, where these are requested and supported. A
        `spoilt` weight lets one slot diverge."""
        parts = self._parts(sides, update, outer, CPU, torch.float64)
        reference = TorchTrainer(*parts[:-1], MemorySamples(parts[-1], parts[1]), 2**30)
        trainer = self.make(*self._parts(sides, update, outer, self.device, self.dtype))
        size = reference.kernel.layout.num_params
        start = torch.randn(SLOTS, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 0.2
        on_path = outer is not None and not OUTER_LOSSES.make(outer).only_final
        if spoilt:
            start[1, 3] = torch.nan
        wanted, seen = (_sums(size, each.step_sizes, gradients=on_path and gradients) for each in (reference, trainer))
        pairs = [(reference.forward(start, wanted), trainer.forward(start.to(self.device, self.dtype), seen))]
        pairs += zip(wanted.losses, seen.losses, strict=True)
        if wanted.outer_gradients is not None and seen.outer_gradients is not None:
            pairs.append((wanted.outer_gradients, seen.outer_gradients))
        supported = trainer.supports_backward(2**30)
        by_torch = self.make is CudaTrainer and bool(update.fused_mu)
        assert supported or by_torch, "a GPU leaves only a proximal term to torch"
        if backward and supported:
            adjoint = torch.randn(SLOTS, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            found = trainer.backward(start.to(self.device, self.dtype), adjoint.to(self.device, self.dtype))
            # Second derivatives lose a digit more.
            self._hold(reference.backward(start, adjoint), found, 10 * tolerance)
        for expected, found in pairs:
            self._hold(expected, found, tolerance)

    def _hold(self, expected: Tensor, found: Tensor, tolerance: float) -> None:
        """Slot by slot as finite, and where they are as large."""
        found = found.cpu().double()
        fine = expected.view(SLOTS, -1).isfinite().all(1)
        assert torch.equal(found.view(SLOTS, -1).isfinite().all(1), fine)
        assert float((expected - found)[fine].norm()) <= tolerance * float(expected[fine].norm())

    def _parts(
        self, sides: Sequence[int], update: LocalOptimizer, outer: str | None, device: torch.device, dtype: torch.dtype
    ) -> Parts:
        draw = torch.Generator().manual_seed(4)
        x = self.rows(sides[0])
        y = torch.randint(0, sides[-1], (ROWS,), generator=draw)
        class_weights = torch.rand(sides[-1], generator=draw, dtype=torch.float64)
        minibatches = plan_batches([(RoundRng(0, "run", 0), own) for own in SLICES], BATCH, BATCH)
        terms = None
        if outer is not None:
            weights = class_weights.to(device, dtype) if outer == "balanced" else None
            factors = torch.tensor([1.0, 0.5, 2.0], dtype=dtype, device=device)
            terms = OuterWeights(OUTER_LOSSES.make(outer), factors, weights)
        rates = torch.tensor([0.1, 0.05, 0.2], dtype=dtype, device=device)
        return stack(sides), y.to(device), minibatches.upload(device, dtype), rates, update, terms, x.to(device, dtype)


def _sums(size: int, like: Tensor, *, gradients: bool) -> StepSums:
    return StepSums(like.new_empty(2, SLOTS), None, like.new_ones(SLOTS, size) if gradients else None)


def learned(federation: SimulatedFederation, trials: int) -> list[Tensor]:
    """Gradients of the weights by several draws, and the last model of several runs in parallel."""
    theta, start = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double(), federation.initial_model("a")
    cases: list[tuple[str, AdjointKind]] = [("path", "first_order"), ("balanced", "first_order"), ("balanced", "exact")]
    gradients = [
        found.gradient
        for outer, adjoint in cases
        for found in unroll_and_grad(
            *(federation, theta, Algorithm(nova()), OUTER_LOSSES.make(outer), adjoint),
            runs=["a", "b"],
            models=[start, start],
        )
    ]
    runs = run_rounds(federation, size(), 2, [f"trial-{trial}" for trial in range(trials)])
    return [*gradients, *(run.model.cpu().double() for run in runs)]


def unequal() -> Environment:
    """Clients of other sizes, so that slots have another order than clients, and now and then absent; their rows are
    stored column by column, as tables are."""
    draw = np.random.default_rng(0)
    sizes = (("a", 7), ("b", 23), ("c", 12))
    rows = {key: (np.asfortranarray(draw.random((n, 20))), draw.integers(0, 5, n)) for key, n in sizes}
    model = ModelSpec(hidden=(16,))
    test = (draw.random((9, 20)), np.arange(9) % 5)
    return Environment.from_arrays(
        rows, test, rounds=3, batch_size=4, lr=0.1, participation_probability=0.7, model=model
    )
