"""What the README shows works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

import fedunfold.unfolding.learner
from fedunfold.cli import main

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {"__name__": "readme"})
    assert Path("weights.safetensors").exists()
    assert Path("weights.png").exists()
    assert re.search(r"learned +\d+\.\d ± \d+\.\d %", capsys.readouterr().out)


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line, with fewer iterations and trials than a user would take."""
    lines = re.findall(r"^    (fedunfold .*?)(?: +#.*)?$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 6
    monkeypatch.setattr(fedunfold.unfolding.learner, "SCHEDULES", {"fast": (2, 0.02)})
    monkeypatch.setattr("fedunfold.unfolding.SCHEDULES", {"fast": (2, 0.02)})
    for line in lines:
        command, _, target = line.partition(" > ")
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command)[1:])
        assert stop.value.code in (0, None), capsys.readouterr().err
        if target:
            Path(target).write_text(capsys.readouterr().out)
