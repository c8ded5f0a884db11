"""Over Flower's own simulation, in processes of its own, the numbers are the engine's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_models_gradients_and_weights_are_the_engines(tmp_path: Path, precision: str, tolerance: float) -> None:
    file = tmp_path / "found.json"
    program = [sys.executable, "-m", "tests.flower.ray_simulation", str(file), precision]
    subprocess.run(program, cwd=ROOT, check=True, timeout=300, capture_output=True)
    found = json.loads(file.read_text())
    assert set(found["flower"]) == {"first_order", "exact", "weights", "model", "private gradient", "private model"}
    for name, values in found["flower"].items():
        over_flower, in_process = torch.tensor(values), torch.tensor(found["simulation"][name])
        error = (over_flower - in_process).norm() / in_process.norm()
        assert error <= tolerance, name
