"""The example notebooks run from top to bottom in the interpreter of the tests, and are kept without outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["own_model", "own_rule", "quickstart"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_cleared(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    # Over a socket in a file: no port is opened.
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(tmp_path / "kernel"))
    NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert any("<table>" in data.get("text/html", "") for data in shown)
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert not re.search(r"warning", printed, re.IGNORECASE)
