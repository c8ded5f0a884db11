"""Image folders in, arrays by client out."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedunfold.core.errors import InputError
from fedunfold.data.importers import image_transform
from fedunfold.data.importers.image_folders import import_images
from tests.support.vision import picture, tiny_vit


def sites(root: Path) -> Path:
    """north has 4 cats and 2 dogs, south 3 dogs and 2 owls, in one grey each."""
    shade = 0
    for client, animals in {"north": {"cat": 4, "dog": 2}, "south": {"dog": 3, "owl": 2}}.items():
        for animal, count in animals.items():
            (root / client / animal).mkdir(parents=True)
            for i in range(count):
                shade += 10
                Image.new("RGB", (20, 10), (shade, shade, shade)).save(root / client / animal / f"{i}.png")
    return root


def test_pixels_are_at_their_clients_and_classes(tmp_path: Path) -> None:
    root = sites(tmp_path / "images")
    for name in ("cat", "owl"):
        (root / "test" / name).mkdir(parents=True)
        Image.new("L", (5, 5), 200).save(root / "test" / name / "t.png")
    seen: list[tuple[int, int]] = []
    made = import_images(root, image_transform.pixels(3), root / "test", on_progress=lambda *at: seen.append(at))
    assert made.classes == ("cat", "dog", "owl")
    assert made.clients["north"][0].tolist() == [[shade] * 9 for shade in (10, 20, 30, 40, 50, 60)]
    assert made.clients["north"][0].dtype == np.uint8  # environments read bytes as x/255
    assert made.clients["north"][1].tolist() == [0, 0, 0, 0, 1, 1]
    assert made.clients["south"][1].tolist() == [1, 1, 1, 2, 2]
    assert made.test[0].tolist() == [[200] * 9] * 2 and made.test[1].tolist() == [0, 2]
    assert seen[-1] == (13, 13)


def test_a_part_of_every_class_is_tested_on(tmp_path: Path) -> None:
    made = import_images(sites(tmp_path / "images"), image_transform.pixels(2, "rgb"), 0.5)
    assert made.clients["north"][1].tolist() == [0, 0, 1] and made.clients["north"][0].shape == (3, 12)
    assert sorted(made.test[1].tolist()) == [0, 0, 1, 1, 1, 2]


def test_features_of_a_backbone(tmp_path: Path) -> None:
    root = sites(tmp_path / "images")
    picture(0).save(root / "north" / "cat" / "9.png")
    made = import_images(root, image_transform.backbone(str(tiny_vit(tmp_path / "vit"))), 0.5)
    x = made.clients["north"][0]
    assert x.shape[1] == 16 and x.dtype == np.float32
    assert np.square(x).mean(1) == pytest.approx(1, rel=1e-5)


def test_what_is_no_image_is_skipped_and_said(tmp_path: Path) -> None:
    root = sites(tmp_path / "images")
    for i in range(12):
        (root / "north" / "cat" / f"x{i:02d}.png").write_text("no image")
    made = import_images(root, image_transform.pixels(), 0.5)
    said = [note for note in made.notes if "skipped" in note]
    assert len(said) == 11 and "north/cat/x00.png: is not an image" in said[0]
    assert said[-1].startswith("2 more files")


def test_refusals(tmp_path: Path) -> None:
    root = sites(tmp_path / "images")
    (root / "test" / "cow").mkdir(parents=True)
    Image.new("L", (5, 5)).save(root / "test" / "cow" / "t.png")
    with pytest.raises(InputError, match=r"test: no client has the class cow"):
        import_images(root, image_transform.pixels(), root / "test")
    with pytest.raises(InputError, match="no client can be called test"):
        import_images(root, image_transform.pixels(), 0.5)
    flat = tmp_path / "flat"
    (flat / "cat").mkdir(parents=True)
    Image.new("L", (5, 5)).save(flat / "cat" / "t.png")
    with pytest.raises(InputError, match="flat/cat: has no subfolder"):
        import_images(flat, image_transform.pixels(), 0.5)
    one = tmp_path / "one"
    (one / "site" / "cat").mkdir(parents=True)
    (one / "site" / "cat" / "t.png").write_text("no image")
    with pytest.raises(InputError, match="only the class cat"):
        import_images(one, image_transform.pixels(), 0.5)
    (one / "site" / "dog").mkdir()
    with pytest.raises(InputError, match="one/site: none of its 1 files"):
        import_images(one, image_transform.pixels(), 0.5)
