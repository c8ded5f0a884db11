"""Modules that are built once, around parameters that stay as they are."""

import pytest
import torch
from torch import Tensor, nn

import fedunfold as fu
from fedunfold.core.errors import InputError
from tests.support.federations import tiny


class Base(nn.Module):
    """A frozen layer in half precision under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(5, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x).relu())
        return out


def test_it_is_built_once_and_initialised_for_every_run() -> None:
    built = []

    def build() -> nn.Module:
        built.append(Base())
        return built[-1]

    env, model = tiny(rounds=1), fu.load_once(build)
    table = fu.compare(env, ["fedavg", fu.uniform()], trials=2, model=model)
    assert len(table.methods) == 2
    assert len(built) == 1
    federation = fu.SimulatedFederation(env, model=model)
    starts = [federation.initial_model(run) for run in ("trial-0", "trial-1", "trial-0")]
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[1])
    assert starts[0].shape == (15,)


def test_training_may_start_from_the_loaded_values() -> None:
    base = Base()
    model = fu.load_once(lambda: base, initialize=lambda module: None)
    federation = fu.SimulatedFederation(tiny(rounds=1), model=model)
    loaded = torch.cat([base.head.weight.flatten(), base.head.bias]).detach()
    assert torch.equal(federation.initial_model("trial-0"), loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_in_half_precision_is_not_cast(dtype: torch.dtype) -> None:
    federation = fu.SimulatedFederation(tiny(rounds=1), model=Base, dtype=dtype)
    module = federation.module(federation.initial_model("trial-0"))
    kernel = federation._backend.kernel._module  # type: ignore[attr-defined]
    assert kernel.base.weight.dtype == module.get_parameter("base.weight").dtype == torch.bfloat16
    assert kernel.base.weight.data_ptr() == module.get_parameter("base.weight").data_ptr()
    assert module(torch.randn(2, 5)).dtype == torch.float32
    assert federation.layout.names == ("head.weight", "head.bias")


def test_frozen_values_count_in_the_digest() -> None:
    def model(scale: float) -> fu.load_once:
        frozen = nn.Linear(5, 4).requires_grad_(False)
        nn.init.constant_(frozen.weight, scale)
        nn.init.zeros_(frozen.bias)
        return fu.load_once(lambda: nn.Sequential(frozen, nn.Tanh(), nn.Linear(4, 3)))

    digests = [fu.SimulatedFederation(tiny(), model=model(scale)).frozen_digest for scale in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]
    assert fu.SimulatedFederation(tiny()).frozen_digest == ""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_layer_that_cannot_be_initialised_is_named() -> None:
    model = fu.load_once(lambda: nn.Sequential(nn.Linear(5, 3).requires_grad_(False), Scaled()))
    with pytest.raises(InputError, match=r"layer '1' \(Scaled\) has no reset_parameters"):
        model()
    with pytest.raises(InputError, match=r"must build a torch\.nn\.Module, not int"):
        fu.load_once(lambda: 3)()  # type: ignore[arg-type, return-value]
