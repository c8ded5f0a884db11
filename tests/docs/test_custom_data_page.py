"""What docs/custom-data.md shows works as it stands there."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from fedunfold.cli import main
from tests.support import sites

PAGE = Path(__file__).parents[2] / "docs" / "custom-data.md"
COMMANDS = re.findall(r"^    fedunfold ([^\n]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


# The Hugging Face library leaves the CSV file that it read to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*visits.csv:pytest.PytestUnraisableExceptionWarning")
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, on data like those the page speaks of; without the extra, its data sets are left out."""
    monkeypatch.chdir(tmp_path)
    sites.hospitals(tmp_path / "sites")
    sites.scans(tmp_path / "scans")
    sites.arrays(tmp_path / "arrays.npz", "a", "b")
    sites.arrays(tmp_path / "whole.npz", "train")
    visits = [f"{'AB'[i % 2]},{i % 7},{('home', 'transfer')[i % 3 > 0]}" for i in range(60)]
    Path("visits.csv").write_text("\n".join(["hospital,days,outcome", *visits]) + "\n")
    with_datasets = importlib.util.find_spec("flwr_datasets") is not None
    if with_datasets:
        datasets = importlib.import_module("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert len(COMMANDS) == 11
    for command in COMMANDS:
        if "--dataset" in command and not with_datasets:
            continue
        with pytest.raises(SystemExit) as stop:
            main(shlex.split(command))
        assert stop.value.code in (0, None), (command, capsys.readouterr().err)
    environments = {"sites", "scans", "arrays", "whole"} | ({"visits", "partitioned"} if with_datasets else set())
    assert {path.stem for path in tmp_path.glob("*.toml")} == environments
    assert Path("runs/sites/weights.safetensors").exists()
    recipe = json.loads(Path("sites.columns.json").read_text(encoding="utf-8"))
    assert [entry["column"] for entry in recipe["features"]] == ["age", "pressure", "ward", "ward"]
