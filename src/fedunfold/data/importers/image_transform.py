"""How an image becomes a row: its pixels made small, or the features of a frozen backbone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = Literal["grey", "rgb"]


@dataclass(frozen=True)
class ImageTransform:
    """`prepare` takes an RGB image, in any thread; `rows` takes a stack of what it gave."""

    prepare: Callable[["Image"], NDArray[Any]]
    rows: Callable[[NDArray[Any]], NDArray[Any]]
    note: str


def pixels(size: int = 28, colour: Colour = "grey") -> ImageTransform:
    """size·size bytes an image, or three times as many; the proportions are not kept. Bytes are read as x/255."""

    def prepare(image: "Image") -> NDArray[np.uint8]:
        small = image.convert("L" if colour == "grey" else "RGB").resize((size, size))
        return np.asarray(small, dtype=np.uint8).reshape(-1)

    return ImageTransform(
        prepare, lambda stack: stack, f"images became {size}×{size} {colour} pixels; --model gives better features."
    )


def backbone(model: str) -> ImageTransform:
    """CLS features of a frozen vision transformer, each row brought to a root mean square of 1."""
    import torch

    from fedunfold.data.vision.backbone import Backbone
    from fedunfold.data.vision.splitting import unit

    loaded = Backbone.load(model, torch.device("cpu"))
    return ImageTransform(
        loaded.preprocessing, lambda stack: unit(loaded.features(stack)), f"images became features of {model}."
    )
