"""Layers that stay with the clients: where they lie, and what is put there."""

import pytest
import torch
from torch import nn

from fedunfold.core.errors import InputError
from fedunfold.core.own_layers import OwnEntries, OwnLayers, own_places
from fedunfold.core.params import ParamLayout


class Nested(nn.Module):
    """A body with all kinds of normalisation, and a head of two parts, the last of which is not the last to run."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 2),  # 0 to 7
            nn.GroupNorm(1, 2),  # 8 to 11
            nn.LayerNorm(2, elementwise_affine=False),
            nn.BatchNorm1d(2, affine=False),  # buffers alone, 20 to 23
        )
        self.head = nn.ModuleDict({"hidden": nn.Linear(2, 2), "out": nn.Linear(2, 1, bias=False)})  # 12 to 17, 18 to 19


def places(module: nn.Module, kind: OwnLayers) -> list[int]:
    found: list[int] = own_places(kind, ParamLayout.of(module)).tolist()
    return found


def test_normalisation_layers_are_all_of_them_with_their_running_statistics() -> None:
    assert places(Nested(), "normalization") == [8, 9, 10, 11, 20, 21, 22, 23]


def test_the_last_layer_is_that_of_the_last_parameter() -> None:
    assert places(Nested(), "last") == [18, 19]


def test_frozen_parameters_are_no_entries() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    module[2].requires_grad_(False)
    assert places(module, "last") == [8, 9, 10, 11, 12, 13, 14, 15]  # the last that is trained


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (nn.Linear(3, 2), "normalization", "the model has none; give it some, or keep its last layer"),
        (nn.Linear(3, 2), "last", "nothing is left to aggregate; give a model with more layers"),
        (nn.Sequential(nn.BatchNorm1d(3)), "normalization", "nothing is left to aggregate"),
    ],
)
def test_a_model_without_such_layers_or_without_others_is_refused(
    module: nn.Module, kind: OwnLayers, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        own_places(kind, ParamLayout.of(module))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_values_are_put_into_copies_of_models() -> None:
    own = OwnEntries(torch.tensor([1, 3]), {2: torch.tensor([5.0, 6.0])})
    shared = torch.arange(4.0)
    found = own.put(shared.expand(2, -1), [2, 0])
    assert found.tolist() == [[0, 5, 2, 6], [0, 1, 2, 3]]
    assert shared.tolist() == [0, 1, 2, 3]
    assert own.shared(found).tolist() == [[0, 0, 2, 0], [0, 0, 2, 0]]


def test_those_who_have_trained_are_replaced_and_averaged_by_size() -> None:
    """(2 · 5 + 6 · 1) / 8 = 2, and (2 · 6 + 6 · 2) / 8 = 3; the third client has not trained."""
    own = OwnEntries(torch.tensor([0, 2]))
    sizes = torch.tensor([2.0, 6.0, 100.0], dtype=torch.float64)
    model = torch.zeros(3)
    assert own.mean_in(model, sizes) is model
    once = own.trained([1, 0], torch.tensor([[9.0, 9.0], [5.0, 6.0]]))
    twice = once.trained([1], torch.tensor([[1.0, 2.0]]))
    assert list(twice.values) == [0, 1]
    assert twice.mean_in(model, sizes).tolist() == [2, 0, 3]
    assert once.values[1].tolist() == [9, 9] and not own.values


def test_a_checkpoint_gives_the_same_back_and_refuses_what_is_not_alike() -> None:
    own = OwnEntries(torch.tensor([1]), {10: torch.tensor([2.0]), 3: torch.tensor([4.0])})
    cpu = torch.device("cpu")
    found = OwnEntries.from_tensors({"model": torch.zeros(2), **own.to_tensors()}, cpu)
    assert found is not None and found.places.tolist() == [1]
    assert {k: values.tolist() for k, values in found.values.items()} == {3: [4.0], 10: [2.0]}
    assert OwnEntries.from_tensors({"model": torch.zeros(2)}, cpu) is None
    with pytest.raises(ValueError, match="not alike"):
        OwnEntries.from_tensors({"own_places": torch.tensor([1]), "own-0": torch.zeros(2)}, cpu)
