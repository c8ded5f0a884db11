"""`fedunfold data features` as it is typed."""

import importlib.util
from pathlib import Path

import pytest

from fedunfold.data.vision import extraction, load_features
from fedunfold.data.vision.images import Batch
from fedunfold.data.vision.partial import PartialResults
from tests.cli.conftest import Command
from tests.support.vision import SKIPPED, image_folder, tiny_vit

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the extra 'vision' is not installed"
)


@pytest.fixture
def typed(fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    image_folder(tmp_path / "images")
    return fedunfold


@needs_transformers
def test_features_are_made_reported_and_left_alone(typed: Command, tmp_path: Path) -> None:
    tiny_vit(tmp_path / "vit")
    command = ("data", "features", "images", "--model", "vit", "--out", "new/f.npz", "--batch-size", 4)
    first = typed(*command, "--format", "json")
    assert first.code == 0, first.err
    assert {item["name"] for item in first.json["skipped"]} == set(SKIPPED)
    facts = {name: value for name, value in first.json.items() if name != "skipped"}
    assert facts == {
        "file": "new/f.npz",
        "model": "vit",
        "dtype": "float16",
        "images": 9,
        "features": 16,
        "classes": 4,
        "empty_classes": ["cow"],
        "resumed": 0,
    }
    for name in SKIPPED:
        assert f"skipped {name}: " in first.err
    assert "class cow has no readable image" in first.err
    assert len(first.err.splitlines()) == 4  # no bars where no terminal is
    second = typed(*command)
    assert second.out == "new/f.npz: 9 images of 4 classes, 16 features each, 3 skipped\n"
    assert second.err == first.err
    assert typed(*command, "--format", "json").json["resumed"] == 11
    assert len(load_features("new/f.npz").y) == 9


@needs_transformers
def test_interrupted_run_says_how_to_go_on(typed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_vit(tmp_path / "vit")
    command = ("data", "features", "images", "--model", "vit", "--out", "f.safetensors", "--batch-size", 3)
    original = PartialResults.add

    def add(self: PartialResults, batch: Batch) -> None:
        if batch.start == 6:
            raise KeyboardInterrupt
        original(self, batch)

    with monkeypatch.context() as stopping:
        stopping.setattr(PartialResults, "add", add)
        outcome = typed(*command)
    assert outcome.code == 130 and outcome.out == ""
    assert outcome.err == "stopped after 6 of 11 files; the same command resumes from there.\n"
    assert typed(*command, "--format", "json").json["resumed"] == 6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("absent", "--out", "f.npz"), "absent"),
        (("images", "--out", "f.csv"), "f.csv"),
        (("images", "--out", "f.npz", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_input(typed: Command, arguments: tuple[str, ...], named: str) -> None:
    outcome = typed("data", "features", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert named in outcome.err


@needs_transformers
def test_float32_and_the_default_model_in_the_help(typed: Command, tmp_path: Path) -> None:
    from fedunfold.cli import data

    assert data.MODEL == extraction.MODEL
    shown = typed("data", "features", "--help")
    assert shown.code == 0 and "Example: fedunfold data features" in shown.out
    tiny_vit(tmp_path / "vit")
    made = typed(
        "data",
        "features",
        "images",
        "--model",
        "vit",
        "--out",
        "f.npz",
        "--dtype",
        "float32",
        "--format",
        "json",
    )
    assert made.json["dtype"] == "float32"
