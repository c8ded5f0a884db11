"""What the README shows works as it stands there."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from fedunfold.cli import main

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {"__name__": "readme"})  # noqa: S102 (our own page)
    assert Path("weights.safetensors").exists()
    assert Path("weights.png").exists()
    assert re.search(r"learned +\d+\.\d ± \d+\.\d %", capsys.readouterr().out)


HEAVY = ("data features", "reproduce", "bench")  # these need a folder of images, hours, and minutes


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line but the heavy ones, which only have to be known."""
    lines = re.findall(r"(?:^    |`)fedunfold +([^`\n#]+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    light = [line.strip() for line in lines if not line.startswith(HEAVY)]
    assert len(light) == 8
    assert len(lines) == len(light) + 6
    for line in lines:
        with pytest.raises(SystemExit) as stop:
            main([*itertools.takewhile(str.isalpha, line.split()), "--help"])
        assert stop.value.code == 0
    for line in light:
        command, _, target = line.partition(" > ")
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command))
        assert stop.value.code in (0, None), capsys.readouterr().err
        if target:
            Path(target).write_text(capsys.readouterr().out)
    assert {folder.name for folder in Path("runs").iterdir()} == {"mine", "compare-digits-flaky"}
