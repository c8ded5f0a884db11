"""The example notebooks run from top to bottom in the interpreter of the tests, and are kept without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_cells(path: Path) -> list[Any]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["custom_model", "custom_rule", "quickstart"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_cleared(path: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    target = tmp_path / path.name
    command = [sys.executable, str(ROOT / "tests" / "support" / "run_notebook.py"), str(path), str(target)]
    home = {"IPYTHONDIR": str(tmp_path / "ipython"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    ended = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    outputs = [output for cell in code_cells(target) for output in cell["outputs"]]
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert any("<table>" in "".join(data.get("text/html", "")) for data in shown)
    assert not any(output.get("name") == "stderr" for output in outputs)
