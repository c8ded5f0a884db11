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
    """From images to rows.

    Attributes:
        prepare: Turns an RGB image into an array, in any thread.
        rows: Turns a stack of such arrays into rows.
        note: What it does, for the user.
    """

    prepare: Callable[["Image"], NDArray[Any]]
    rows: Callable[[NDArray[Any]], NDArray[Any]]
    note: str


def pixels(size: int = 28, colour: Colour = "grey") -> ImageTransform:
    """Small pixels, as bytes that environments read as x/255.

    Args:
        size: Height and width; the proportions of the image are lost.
        colour: One byte for each pixel, or three.

    Returns:
        The transform to rows of size² or 3·size² bytes.
    """

    def prepare(image: "Image") -> NDArray[np.uint8]:
        small = image.convert("L" if colour == "grey" else "RGB").resize((size, size))
        return np.asarray(small, dtype=np.uint8).reshape(-1)

    note = f"images became {size}×{size} {colour} pixels; a model's features are better."
    return ImageTransform(prepare, lambda stack: stack, note)


def backbone(model: str) -> ImageTransform:
    """CLS features of a frozen vision transformer, each row brought to a root mean square of 1.

    Args:
        model: Its name on the Hugging Face hub, or a folder.

    Returns:
        The transform to rows of the model's width.
    """
    import torch

    from fedunfold.data.vision.backbone import Backbone
    from fedunfold.data.vision.splitting import unit

    loaded = Backbone.load(model, torch.device("cpu"))
    return ImageTransform(
        loaded.prepare, lambda stack: unit(loaded.features(stack)), f"images became features of {model}."
    )
