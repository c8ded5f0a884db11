"""Which models the simulation takes, and by which path."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.params import ModelFactory
from fedunfold.rules import size
from fedunfold.training.loop import run_rounds
from fedunfold.unfolding.adjoint import unroll_and_grad
from fedunfold.unfolding.outer_loss import Path
from tests.support.federations import RUN, Plain, assert_same, simulated, tiny, train


def of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Counting(nn.Module):
    """Keeps count of its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def test_constant_buffers_are_fine() -> None:
    def centred() -> nn.Module:
        layer = nn.Linear(5, 3)
        layer.register_buffer("mean", torch.ones(5))
        return layer

    assert simulated(tiny(), centred).kernel == "ModuleKernel"


def test_the_trained_module_predicts_as_the_federation_evaluates() -> None:
    env = tiny()
    federation = simulated(env)
    model = run_rounds(federation, size(), 2)[0].model
    data = env.load()
    predicted = federation.module(model)(data.x_test).argmax(1)
    accuracy = (predicted == data.y_test).double().mean().item()
    assert federation.evaluate([model])[0].score == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: of(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), "client 'a': its last minibatch is a single"),
        (lambda: of(nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), r"layer '0' \(BatchNorm1d\) has no momentum"),
        (lambda: of(nn.Linear(5, 3), nn.AlphaDropout(0.1)), r"layer '1' \(AlphaDropout\) draws at random"),
        (lambda: of(nn.Linear(5, 3), nn.RReLU()), "other outputs for the same rows each time it is trained"),
        (
            lambda: of(nn.Linear(5, 2)),
            r"gives \[20, 2\] for 20 rows, where the task classification needs outputs of shape \[20, 3\]",
        ),
        (lambda: of(nn.Linear(4, 3)), r"cannot read rows of shape \[5\]"),
        (Counting, "changes its buffer 'calls'"),
        (nn.Identity, "no parameters to train"),
        (lambda: nn.Linear(5, 3).requires_grad_(False), "no parameters to train"),
        (nn.Linear(5, 3), "pass a function that builds the model"),
    ],
    ids=[
        "single-row",
        "no-momentum",
        "alpha-dropout",
        "random",
        "classes",
        "width",
        "buffers",
        "no-parameters",
        "all-frozen",
        "instance",
    ],
)
def test_models_that_cannot_be_replayed_are_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        simulated(tiny(), model)
    assert "\n" not in str(caught.value)


def test_dropout_of_nothing_is_no_dropout() -> None:
    assert simulated(tiny(), lambda: of(nn.Linear(5, 3), nn.Dropout(0.0))).kernel == "ModuleKernel"


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (lambda: of(nn.Flatten(), nn.Linear(5, 3)), "MLPKernel"),
        (lambda: of(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), "MLPKernel"),
        (lambda: of(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), "ModuleKernel"),
        (lambda: of(nn.Linear(5, 3), nn.ReLU()), "ModuleKernel"),
        (lambda: of(nn.Linear(5, 4), nn.Linear(4, 3)), "ModuleKernel"),
        (lambda: nn.Linear(5, 3), "ModuleKernel"),
    ],
)
def test_which_models_take_the_batched_path(model: ModelFactory, kernel: str) -> None:
    assert simulated(tiny(), model).kernel == kernel


def half_frozen() -> nn.Module:
    """The first layer is the same in every build, as a pretrained one would be."""
    first = nn.Linear(5, 4, bias=False).requires_grad_(False)
    first.weight.copy_(torch.linspace(-1, 1, 20).reshape(4, 5))
    return of(first, nn.ReLU(), nn.Linear(4, 3))


def test_frozen_parameters_stay_and_are_not_in_the_vector() -> None:
    env = tiny()
    federation = simulated(env, half_frozen)
    start = federation.initial_model(RUN)
    assert start.shape == (4 * 3 + 3,)
    result = run_rounds(federation, size(), env.rounds)[0]
    assert_same(result.model, Plain(env, half_frozen).averaged(start, env.rounds))


def test_learning_through_a_half_frozen_model() -> None:
    federation = simulated(tiny(), half_frozen)
    start = federation.initial_model(RUN)
    theta = torch.ones(2, 3, dtype=torch.float64)
    found = unroll_and_grad(federation, theta, Algorithm(), Path(), "exact", runs=[RUN], models=[start])[0]
    assert found.model.shape == start.shape
    assert float(found.gradient.norm()) > 0


def test_single_precision_stays_single() -> None:
    report = train(simulated(tiny(), dtype=torch.float32), "gradients", "loss")
    assert report.updates.rows.dtype == torch.float32
    assert report.num_examples.dtype == torch.float64


# --- which models take the fast path -----------------------------------------------------------------------


class Scaled(nn.Sequential):
    """Linear layers with a `forward` that does more than run them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return 5 * x


def scaled() -> nn.Module:
    return Scaled(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def layer_used_twice() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(5, 3))


def tied_weights() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(5, 3))


def hooked() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.register_forward_hook(lambda _module, _inputs, out: 5 * out)
    return nn.Sequential(layer)


@pytest.mark.parametrize("build", [scaled, layer_used_twice, tied_weights, hooked])
def test_look_alikes_run_as_they_are(build: ModelFactory) -> None:
    env = tiny()
    federation = simulated(env, build)
    assert federation.kernel == "ModuleKernel"
    expected = Plain(env, build).averaged(federation.initial_model(RUN), 1)
    torch.testing.assert_close(run_rounds(federation, size(), 1)[0].model, expected)


def test_any_module_runs_where_gradients_are_switched_off() -> None:
    env = tiny()
    with torch.no_grad():
        off = run_rounds(simulated(env, scaled), size(), 1)[0].model
    torch.testing.assert_close(off, run_rounds(simulated(env, scaled), size(), 1)[0].model)
