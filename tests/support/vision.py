"""A vision transformer of a few hundred weights and a small image folder, both made on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedunfold.core.errors import InputError

PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
}


def tiny_vit(folder: Path, seed: int = 0, **preprocessor: Any) -> Path:
    """Saves a model as its folder on the hub would look; arguments change its preprocessing."""
    transformers: Any = pytest.importorskip("transformers", reason="the extra 'vision' is not installed")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.ViTModel(config)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | preprocessor))
    return folder


def picture(seed: int, mode: str = "RGB", width: int = 40, height: int = 30) -> Image.Image:
    shape = {"L": (height, width), "RGB": (height, width, 3), "RGBA": (height, width, 4)}[mode]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


READABLE = (
    "ant/a.png",
    "ant/b.png",
    "ant/deeper/c.jpg",
    "bee/alpha.png",
    "bee/gray.png",
    "bee/palette.gif",
    "dog/d0.png",
    "dog/d1.png",
    "dog/d2.png",
)
SKIPPED = ("readme.txt", "ant/broken.png", "bee/notes.txt")


def image_folder(folder: Path) -> Path:
    """9 images of the classes ant, bee and dog; cow is empty, one file is damaged and two are no images."""
    for name in ("ant/deeper", "bee", "cow", "dog"):
        (folder / name).mkdir(parents=True)
    picture(0).save(folder / "ant/a.png")
    picture(1, width=70, height=90).save(folder / "ant/b.png")
    picture(2).save(folder / "ant/deeper/c.jpg")
    picture(3, "RGBA").save(folder / "bee/alpha.png")
    picture(4, "L").save(folder / "bee/gray.png")
    picture(5).quantize(16).save(folder / "bee/palette.gif")
    for i in range(3):
        picture(6 + i).save(folder / f"dog/d{i}.png")
    whole = (folder / "ant/a.png").read_bytes()
    (folder / "ant/broken.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bee/notes.txt").write_text("no image")
    (folder / "readme.txt").write_text("about these images")
    (folder / "dog/.hidden").write_text("of the file manager")
    return folder


def one_line(caught: pytest.ExceptionInfo[InputError], *named: object) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for text in named:
        assert str(text) in message, message
