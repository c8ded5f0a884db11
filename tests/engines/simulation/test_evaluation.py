"""Several models that read the same samples."""

import pytest
import torch
from torch import nn

from fedunfold.core.outcomes import Evaluation
from fedunfold.engines.simulation import evaluation
from fedunfold.engines.simulation.batching import MemorySamples
from fedunfold.engines.simulation.kernels.base import Kernel
from fedunfold.engines.simulation.kernels.module import ModuleKernel
from fedunfold.tasks import classification
from tests.support.comparing import normal_rows, stack
from tests.support.federations import simulated, tiny


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(stack((20, 33, 5)), id="a stack"),
        pytest.param(
            ModuleKernel(
                nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 5)).double(), classification(5), normal_rows(20)
            ),
            id="any module",
        ),
    ],
)
@pytest.mark.parametrize(("rows", "numbers"), [(30, 2**28), (1000, 500), (1000, 1)])
def test_models_predict_together_what_each_predicts_alone(
    kernel: Kernel, rows: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of the 73 rows are read at once."""
    monkeypatch.setitem(evaluation.ROWS_AT_ONCE, "cpu", rows)
    monkeypatch.setattr(evaluation, "NUMBERS_AT_ONCE", numbers)
    draw = torch.Generator().manual_seed(5)
    x, y = normal_rows(20), torch.randint(0, 5, (73,), generator=draw)
    size = sum(shape.numel() for shape in kernel.layout.shapes)
    models = torch.randn(3, size, generator=draw, dtype=torch.float64)
    samples = MemorySamples(x, y)
    together = evaluation.predictions(kernel, models, samples)
    alone = [evaluation.predictions(kernel, model[None], samples) for model in models]
    assert together[0].shape == together[1].shape == (3, 73)
    assert not torch.equal(together[0][0], together[0][1])
    torch.testing.assert_close(together[0], torch.cat([predicted for predicted, _ in alone]))
    torch.testing.assert_close(together[1], torch.cat([losses for _, losses in alone]), rtol=1e-12, atol=1e-12)


def test_a_federation_tests_models_together_as_each_alone() -> None:
    federation = simulated(tiny(), lambda: nn.Sequential(nn.Linear(5, 3)))
    models = [federation.initial_model(run) for run in ("a", "b", "c")]

    def numbers(tested: Evaluation) -> list[float]:
        return [tested.score, tested.loss, *tested.class_accuracy.tolist()]

    together = [numbers(tested) for tested in federation.evaluate(models)]
    assert together == [numbers(federation.evaluate([model])[0]) for model in models]
    assert together[0] != together[1]
