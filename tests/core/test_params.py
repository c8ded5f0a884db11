"""Models as vectors: parameters first, then the buffers that training changes."""

import pytest
import torch
from torch import nn

from fedunfold.core.errors import InputError
from fedunfold.core.params import ParamLayout, fingerprint, flatten_model, load_model, seeded


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))


LAYOUT = ParamLayout.of(normalised())


def test_what_is_trained_and_what_is_a_buffer() -> None:
    assert LAYOUT.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [tuple(shape) for shape in LAYOUT.shapes] == [(2, 3), (2,), (2,), (2,)]
    assert LAYOUT.buffer_names == ("1.running_mean", "1.running_var")
    assert (LAYOUT.num_params, LAYOUT.num_buffer_entries, LAYOUT.size) == (12, 4, 16)


def test_a_vector_comes_apart_and_together() -> None:
    vectors = torch.arange(32.0).view(2, 16)
    assert LAYOUT.params(vectors).tolist() == vectors[:, :12].tolist()
    assert LAYOUT.buffers(vectors).tolist() == vectors[:, 12:].tolist()
    other = LAYOUT.with_buffers(vectors, torch.zeros(2, 4))
    assert torch.equal(LAYOUT.params(other), LAYOUT.params(vectors))
    assert not LAYOUT.buffers(other).any()
    bare = ParamLayout.of(nn.Linear(3, 2))
    assert bare.with_buffers(vectors, torch.zeros(2, 0)) is vectors
    assert bare.params(vectors[:, :8]).shape == (2, 8)


def test_a_module_and_its_vector() -> None:
    module = normalised()
    vector = torch.arange(16.0)
    load_model(module, vector)
    assert torch.equal(flatten_model(module), vector)
    assert module[0].bias.tolist() == [6, 7]  # type: ignore[index]
    assert module[1].running_var.tolist() == [14, 15]  # type: ignore[index]


def test_vectors_of_another_length_are_refused() -> None:
    LAYOUT.check(torch.zeros(2, 16), "the adjoint")
    with pytest.raises(InputError, match="the adjoint has 15 entries, where this federation's model has 16"):
        LAYOUT.check(torch.zeros(2, 15), "the adjoint")


def test_a_runs_model_is_its_own_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (flatten_model(seeded(normalised, 0, run)) for run in ("a", "a", "b"))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
