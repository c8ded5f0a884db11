"""Updates stored in half the memory or on disk, and what that does to the gradient."""

import errno
import tempfile
from pathlib import Path
from typing import get_args

import pytest
import torch

from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.errors import InputError, WriteError
from fedunfold.core.parts import OUTER_LOSSES
from fedunfold.server import adam
from fedunfold.unfolding import Learning
from fedunfold.unfolding.adjoint import AdjointKind, unroll_and_grad
from fedunfold.unfolding.update_store import UpdateStorage
from tests.support.federations import simulated, tiny

RUN = "learn-0"


def gradient(storage: UpdateStorage, absent: Absent, adjoint: AdjointKind, dtype: torch.dtype) -> torch.Tensor:
    federation = simulated(tiny(participation_probability=0.6, rounds=6, seed=3), dtype=dtype)
    theta = torch.linspace(0.4, 0.9, 18, dtype=torch.float64).view(6, 3)
    algorithm = Algorithm(server=adam(), absent=absent)
    start = federation.initial_model(RUN)
    parts = (federation, theta, algorithm, OUTER_LOSSES.make("path"), adjoint)
    return unroll_and_grad(*parts, runs=[RUN], models=[start], storage=storage)[0].gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjoint", get_args(AdjointKind))
@pytest.mark.parametrize("absent", ["keep", "drop", "remember"])
def test_the_gradient(absent: Absent, adjoint: AdjointKind, dtype: torch.dtype) -> None:
    full = gradient("full", absent, adjoint, dtype)
    rounding = 1e-5 if dtype == torch.float32 else 1e-12  # products of rows one by one are summed in another order
    assert torch.allclose(
        gradient("disk", absent, adjoint, dtype), full, rtol=0, atol=rounding * float(full.abs().max())
    )
    half = gradient("half", absent, adjoint, dtype)
    assert 0 < float((half - full).norm() / full.norm()) < 2**-11


def test_the_file_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gradient("disk", "keep", "first_order", torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(WriteError, match=r"cannot be written to .*: No space left on device; make room there"):
        gradient("disk", "keep", "first_order", torch.float32)


def test_other_storages_are_refused() -> None:
    with pytest.raises(InputError, match="update_storage of a learning is one of full, half, disk, not 'tape'"):
        Learning(update_storage="tape")  # type: ignore[arg-type]
