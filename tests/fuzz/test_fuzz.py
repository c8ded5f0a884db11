"""A short run over every format, and what is valid is understood."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.formats import NAMES, format_of
from tests.fuzz.working import CORPUS

HERE = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_valid_is_understood(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        understood = format_of(name).fuzz(file.read_bytes())
        assert understood != file.name.startswith("refused"), file


@pytest.mark.slow
def test_what_is_not_is_refused_in_one_line_without_harm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", str(200 * len(NAMES)), "--failures", str(tmp_path)]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    failures = tmp_path / "failures.txt"
    assert ended.returncode == 0, ended.stdout + ended.stderr + (failures.read_text() if failures.exists() else "")
    assert f"{200 * len(NAMES)} cases, 0 failed" in ended.stdout
