"""Frozen-backbone features: the numbers, stopping and going on, finished files, and what is refused."""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file, save_file

from fedunfold.core.errors import InputError
from fedunfold.data.vision import load_features
from fedunfold.data.vision.backbone import Backbone
from fedunfold.data.vision.extraction import Extraction, extract
from tests.support.vision import READABLE, SKIPPED, image_folder, one_line, picture, tiny_vit

DOGS = Path(os.environ.get("FEDUNFOLD_DATA") or "no-data-folder") / "dogs_deit_tiny.npz"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the extra 'vision' is not installed"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # heeded by child processes; here nothing asks the hub


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vit(tmp_path_factory.mktemp("model") / "tiny-vit")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


def direct(vit: Path, paths: list[Path]) -> NDArray[np.float32]:
    """The same features by transformers alone, its own pillow-based preprocessing included."""
    transformers: Any = pytest.importorskip("transformers")
    rgb = []
    for path in paths:
        with Image.open(path) as image:
            rgb.append(image.convert("RGB"))
    prepare = transformers.ViTImageProcessorPil.from_pretrained(vit)
    with torch.no_grad():
        model = transformers.ViTModel.from_pretrained(vit)
        hidden = model(**prepare(images=rgb, return_tensors="pt")).last_hidden_state
    result: NDArray[np.float32] = hidden[:, 0].numpy()
    return result


class Interrupt:
    """Stops a run after some files, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, total: int) -> None:
        if done >= self.after:
            raise KeyboardInterrupt


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each forward pass had."""
    passes: list[int] = []
    original = Backbone.features

    def counted(self: Backbone, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        passes.append(len(pixels))
        return original(self, pixels)

    monkeypatch.setattr(Backbone, "features", counted)
    return passes


# --- what is computed ---


@needs_transformers
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_features_equal_a_direct_forward_pass(tmp_path: Path, vit: Path, images: Path, ending: str) -> None:
    out = tmp_path / f"features{ending}"
    made = extract(images, out, model=str(vit), dtype="float32", batch_size=4)
    found = load_features(out)
    assert found.names == READABLE
    assert found.classes == ("ant", "bee", "cow", "dog")
    assert found.y.tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 3]
    expected = direct(vit, [images / name for name in READABLE])
    np.testing.assert_allclose(found.x, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(found.x, axis=0).min() > 1e-3  # the tiny model does tell the images apart
    assert {item.name for item in made.about.skipped} == set(SKIPPED)
    assert made.empty_classes == ("cow",)
    assert list(tmp_path.iterdir()) == [out]


@needs_transformers
def test_layout_is_that_of_the_dogs_file(tmp_path: Path, vit: Path, images: Path) -> None:
    out = tmp_path / "features.npz"
    extract(images, out, model=str(vit))
    with np.load(out, allow_pickle=False) as archive:
        assert {"x", "y", "name", "synset"} <= set(archive.files)
        assert archive["x"].dtype == np.float16 and archive["y"].dtype == np.uint8
        assert archive["name"].dtype.kind == archive["synset"].dtype.kind == "U"
        assert str(tmp_path) not in "".join(str(archive[name]) for name in archive.files)


@needs_transformers
def test_reasons_for_skipping(tmp_path: Path, vit: Path) -> None:
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    picture(0).save(folder / "a/good.png")
    Image.fromarray(np.full((9, 9), 3000, dtype=np.uint16)).save(folder / "a/deep.png")
    (folder / "a/empty.jpg").touch()
    (folder / "a/gone.jpg").symlink_to("nowhere.jpg")
    (folder / "a/round").symlink_to(folder, target_is_directory=True)
    made = extract(folder, tmp_path / "x.npz", model=str(vit))
    assert made.features.names == ("a/good.png",)
    reasons = dict(made.about.skipped)
    assert reasons.keys() == {"a/deep.png", "a/empty.jpg", "a/gone.jpg", "a/round"}
    assert "8 bits" in reasons["a/deep.png"]
    assert reasons["a/empty.jpg"] == "is not an image"
    assert reasons["a/gone.jpg"] == "No such file or directory"


def test_images_are_turned_as_they_are_seen(tmp_path: Path) -> None:
    from fedunfold.data.vision.images import read_rgb

    lying = picture(0, width=20, height=10)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    lying.save(tmp_path / "photo.png", exif=exif)
    seen = read_rgb(tmp_path / "photo.png")
    assert seen.size == (10, 20)
    assert np.array_equal(np.asarray(seen), np.rot90(np.asarray(lying), -1))


@needs_transformers
@pytest.mark.parametrize(
    "change",
    [
        {"size": {"shortest_edge": 32}},
        {"size": {"height": 32}},
        {"size": 0},
        {"do_resize": False},
        {"image_std": [0.5, 0.5, 0]},
        {"image_mean": [0.5]},
        {"resample": 9},
        {"image_processor_type": "Bit", "do_center_crop": True, "crop_size": {"shortest_edge": 3}},
    ],
)
def test_preprocessing_that_makes_no_batch(tmp_path: Path, change: dict[str, Any]) -> None:
    model = tiny_vit(tmp_path / "model", **change)
    with pytest.raises(InputError) as caught:
        Backbone.load(str(model), torch.device("cpu"))
    one_line(caught, f"model {model}", "preprocessor_config.json")


# --- stopping and going on ---


@needs_transformers
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_a_stopped_run_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, vit: Path, images: Path, computed: list[int], ending: str
) -> None:
    whole, out = tmp_path / f"whole{ending}", tmp_path / f"stopped{ending}"
    extract(images, whole, model=str(vit), batch_size=2)
    assert computed == [2, 1, 2, 1, 2, 1]
    computed.clear()
    with pytest.raises(KeyboardInterrupt):
        extract(images, out, model=str(vit), batch_size=2, on_progress=Interrupt(after=4))
    assert not out.exists()
    assert computed == [2, 1]
    seen: list[tuple[int, int]] = []
    made = extract(
        images, out, model=str(vit), batch_size=2, on_progress=lambda done, total: seen.append((done, total))
    )
    assert computed == [2, 1, 2, 1, 2, 1]  # none of them twice
    assert made.resumed == 4 and seen[0] == (4, 11) and seen[-1] == (11, 11)
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted((whole, out))


KILLED = """
import os, signal, sys
from fedunfold.data.vision.extraction import extract
def kill(done, total):
    if done == 6: os.kill(os.getpid(), signal.SIGKILL)
extract(sys.argv[1], sys.argv[2], model=sys.argv[3], batch_size=3, on_progress=kill)
"""


@needs_transformers
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_run_goes_on(tmp_path: Path, vit: Path, images: Path, computed: list[int]) -> None:
    out = tmp_path / "killed.npz"
    child = subprocess.run([sys.executable, "-c", KILLED, str(images), str(out), str(vit)], timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["killed.npz.partial"]
    assert extract(images, out, model=str(vit), batch_size=3).resumed == 6
    assert sum(computed) == 4  # ant 3 + 1 broken, bee 2 of 4 were done
    assert [path.name for path in tmp_path.iterdir()] == ["killed.npz"]


def stopped(images: Path, out: Path, vit: Path, after: int = 6) -> Path:
    with pytest.raises(KeyboardInterrupt):
        extract(images, out, model=str(vit), batch_size=2, on_progress=Interrupt(after))
    return out.with_name(out.name + ".partial")


@needs_transformers
def test_a_damaged_batch_is_computed_again(tmp_path: Path, vit: Path, images: Path) -> None:
    extract(images, tmp_path / "whole.npz", model=str(vit), batch_size=2)
    partial = stopped(images, tmp_path / "x.npz", vit)
    second = sorted(partial.glob("0*.npz"))[1]
    second.write_bytes(second.read_bytes()[:50])
    (partial / ".000000006-left.npz").touch()  # of a kill while writing
    made = extract(images, tmp_path / "x.npz", model=str(vit), batch_size=2)
    assert made.resumed == 2
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not partial.exists()


@needs_transformers
def test_another_batch_size_may_go_on(tmp_path: Path, vit: Path, images: Path) -> None:
    whole = extract(images, tmp_path / "whole.npz", model=str(vit), dtype="float32")
    stopped(images, tmp_path / "x.npz", vit)
    made = extract(images, tmp_path / "x.npz", model=str(vit), batch_size=5, dtype="float32")
    assert made.resumed == 6 and made.features.names == whole.features.names
    np.testing.assert_allclose(made.features.x, whole.features.x, rtol=1e-4, atol=1e-5)


@needs_transformers
def test_partial_results_of_another_run_are_not_mixed_in(tmp_path: Path, vit: Path) -> None:
    folder, out = image_folder(tmp_path / "images"), tmp_path / "x.npz"
    partial = stopped(folder, out, vit)
    (partial / "mine.txt").touch()
    other = tiny_vit(tmp_path / "elsewhere" / vit.name, seed=1)  # of the same name
    with pytest.raises(InputError) as caught:
        extract(folder, out, model=str(other))
    one_line(caught, partial, "backbone differs", "again")
    picture(9).save(folder / "cow/new.png")
    with pytest.raises(InputError) as caught:
        extract(folder, out, model=str(vit))
    one_line(caught, partial, "images differs", "again")
    assert extract(folder, out, model=str(other), again=True).resumed == 0
    assert [path.name for path in partial.iterdir()] == ["mine.txt"]


# --- finished files ---


@needs_transformers
def test_a_finished_file_is_not_computed_again(
    tmp_path: Path, vit: Path, images: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.npz"
    first = extract(images, out, model=str(vit))
    stamp, content = out.stat().st_mtime_ns, out.read_bytes()
    computed.clear()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)  # not even needed
        second = extract(images, out, model=str(vit))
    assert computed == [] and out.stat().st_mtime_ns == stamp
    assert second.about == first.about and second.resumed == 11
    assert np.array_equal(first.features.x, second.features.x)
    extract(images, out, model=str(vit), again=True)
    assert sum(computed) == 9 and out.read_bytes() == content


@needs_transformers
def test_a_finished_file_of_something_else_is_not_taken_for_it(tmp_path: Path, vit: Path) -> None:
    folder, out = image_folder(tmp_path / "images"), tmp_path / "x.npz"

    def refused(reason: str, **changes: Any) -> None:
        with pytest.raises(InputError) as caught:
            extract(folder, out, **({"model": str(vit)} | changes))
        one_line(caught, out, reason, "again")

    extract(folder, out, model=str(vit))
    refused("tiny-vit", model="some/other")
    refused("stored as float16", dtype="float32")
    picture(9).save(folder / "cow/new.png")
    refused("other images")
    np.savez(out, x=np.ones((1, 2)), y=[0], name=["a"], synset=["b"])
    refused("does not say")
    out.write_bytes(b"PK")
    refused("not an .npz")


# --- what cannot be used ---


def refused(images: Path, out: Path, *named: object, **changes: Any) -> None:
    with pytest.raises(InputError) as caught:
        extract(images, out, **changes)
    one_line(caught, *named)
    assert not out.exists()


def test_folders_that_are_none(tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    refused(tmp_path / "absent", out, tmp_path / "absent", "is not a folder")
    flat = tmp_path / "flat"
    flat.mkdir()
    picture(0).save(flat / "a.png")
    refused(flat, out, flat, "no subfolder")
    (flat / "class").mkdir()
    refused(flat, out, flat, "hold no file")


def test_settings_that_cannot_be(tmp_path: Path, images: Path) -> None:
    refused(images, tmp_path / "x.csv", "x.csv", ".npz or .safetensors")
    refused(images, tmp_path / "x.npz", "batch size", batch_size=0)
    refused(images, tmp_path / "x.npz", "float64", dtype="float64")


@needs_transformers
def test_a_folder_without_any_readable_image(tmp_path: Path, vit: Path) -> None:
    (tmp_path / "images/a").mkdir(parents=True)
    (tmp_path / "images/a/note.txt").write_text("no")
    refused(tmp_path / "images", tmp_path / "x.npz", "a/note.txt", "is not an image", model=str(vit))


@pytest.mark.parametrize("package", ["transformers", "PIL"])
def test_missing_extra(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refused(images, tmp_path / "x.npz", "pip install 'fedunfold[vision]'", model="any")


@needs_transformers
def test_models_that_cannot_be_loaded(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "x.npz"
    refused(images, out, "google/vit", "give a local folder", model="google/vit-base-patch16-224-in21k")
    refused(images, out, "./absent", "give a local folder", model="./absent")
    model = tiny_vit(tmp_path / "model")
    (model / "model.safetensors").rename(model / "aside")
    refused(images, out, model, "model.safetensors", model=str(model))
    (model / "model.safetensors").write_bytes(b"garbage")
    refused(images, out, model, "cannot be loaded", model=str(model))
    (model / "aside").rename(model / "model.safetensors")
    (model / "preprocessor_config.json").rename(model / "aside")
    refused(images, out, model, "preprocessor_config.json", model=str(model))
    (model / "preprocessor_config.json").write_text("{")
    refused(images, out, model, "preprocessor_config.json", model=str(model))
    assert capfd.readouterr() == ("", "")


@needs_transformers
def test_models_whose_features_would_mean_nothing(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "x.npz"
    wrong_size = tiny_vit(tmp_path / "size", size=24)
    refused(images, out, "refuses its input", "24", model=str(wrong_size))
    model = tiny_vit(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("layernorm")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    refused(images, out, model, "lacks 2 of its weights", model=str(model), again=True)
    broken = {name: np.full_like(value, np.nan) for name, value in weights.items()}
    save_file(broken, model / "model.safetensors", metadata={"format": "pt"})
    refused(images, out, "ant/a.png", "NaN", model=str(model), again=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"mask_ratio": 0.75}))
    refused(images, out, model, "at random", model=str(model), again=True)


@needs_transformers
def test_a_pooler_without_weights_does_no_harm(tmp_path: Path, images: Path, vit: Path) -> None:
    model = tiny_vit(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler")}
    assert len(kept) == len(weights) - 2
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})

    def made(name: str, model: Path) -> Extraction:
        return extract(images, tmp_path / name, model=str(model))

    first, second = made("a.npz", model), made("b.npz", model)
    assert first.about == second.about  # though the pooler is random, and another one each time
    assert np.array_equal(first.features.x, made("c.npz", vit).features.x)
