"""A run's model in a fresh process, and in formats of others."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.runs.trained_model import TrainedModel
from tests.cli.conftest import Command


@pytest.fixture
def run(fedunfold: Command, tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "digits"
    assert fedunfold("run", "digits-label-skew", "--rounds", 2, "--out", folder).code == 0
    return folder


def expected(x: torch.Tensor) -> torch.Tensor:
    env = fu.environment("digits-label-skew").replace(rounds=2)
    with torch.no_grad():
        logits: torch.Tensor = fu.trained_module(env, fu.run(env))(x)
    return logits


def rows(n: int = 5) -> torch.Tensor:
    return fu.environment("digits-label-skew").load().x_test[:n]


def test_it_is_loaded_in_a_fresh_process_without_its_data(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows().numpy())
    code = (
        "import sys, numpy, torch, fedunfold as fu\n"
        "model = fu.load_model(sys.argv[1])\n"
        "assert 'sklearn.datasets' not in sys.modules\n"
        "print(model(torch.from_numpy(numpy.load(sys.argv[2]))).tolist())"
    )
    arguments = [sys.executable, "-c", code, str(run), str(tmp_path / "x.npy")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = torch.tensor(json.loads(done.stdout))
    torch.testing.assert_close(found, expected(rows()), rtol=1e-6, atol=1e-6)


def test_in_onnx_it_gives_the_same_for_any_number_of_rows(run: Path, fedunfold: Command, tmp_path: Path) -> None:
    file = tmp_path / "digits.onnx"
    assert fedunfold("export", run, "--to", "onnx", "--out", file).code == 0
    onnx.checker.check_model(onnx.load(file))
    session = ReferenceEvaluator(str(file))
    for n in (1, 7):
        (found,) = session.run(None, {session.input_names[0]: rows(n).numpy()})
        np.testing.assert_allclose(np.asarray(found), expected(rows(n)).numpy(), rtol=1e-4, atol=1e-5)


def test_exported_by_torch_it_runs_without_this_package(run: Path, fedunfold: Command, tmp_path: Path) -> None:
    file = tmp_path / "digits.pt2"
    assert fedunfold("export", run, "--to", "torch-export", "--out", file).code == 0
    found = torch.export.load(file).module()(rows(3))
    torch.testing.assert_close(found, expected(rows(3)), rtol=1e-6, atol=1e-6)


def test_parameters_alone(run: Path, fedunfold: Command) -> None:
    said = fedunfold("export", run, "--format", "json").json
    state = load_file(said["file"])
    assert said["row_shape"] == [64]
    assert said["task"] == {"name": "classification", "classes": 10}
    assert all(torch.equal(state[name], value) for name, value in fu.load_model(run).state_dict().items())


def test_what_holds_no_model_is_refused(run: Path, fedunfold: Command, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(InputError, match="holds no trained model"):
        fu.load_model(folder)
    refused = fedunfold("export", folder)
    assert refused.code != 0
    assert "holds no trained model" in refused.err
    assert not list(folder.iterdir())
    for name in ("model.safetensors", "model.json"):
        (folder / name).write_bytes((run / name).read_bytes())
    (folder / "model.json").write_text((run / "model.json").read_text().replace("64", "63"))
    with pytest.raises(InputError, match=r"model.safetensors is damaged or of another model"):
        TrainedModel.load(folder)
    (folder / "model.json").write_text('{"model": 3}')
    with pytest.raises(InputError, match=r"model.json is damaged: field model: must be an object"):
        TrainedModel.load(folder)
