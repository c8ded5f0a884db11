"""From an image to the numbers a model expects, as its own preprocessor_config.json says.

Written with pillow and numpy, because transformers' AutoImageProcessor demands torchvision, and its classes for pillow
take half as long again.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Settings

if TYPE_CHECKING:
    from PIL.Image import Image

UNDERSTOOD = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"}


class Size(Settings):
    """Both sides, or the shorter one in proportion.

    Attributes:
        height: Of the image.
        width: Of the image.
        shortest_edge: The shorter side, in place of both.
    """

    height: Count | None = None
    width: Count | None = None
    shortest_edge: Count | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        both = self.height is not None and self.width is not None
        neither = self.height is None and self.width is None
        if not (both and self.shortest_edge is None) and not (neither and self.shortest_edge is not None):
            raise ValueError("must be a number, height and width, or shortest_edge")
        return self

    def of(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that an image of this width and height is brought to."""
        if self.shortest_edge is not None:
            short, long = sorted((width, height))
            longer = int(self.shortest_edge * long / short)
            return (self.shortest_edge, longer) if width <= height else (longer, self.shortest_edge)
        assert self.width is not None and self.height is not None
        return self.width, self.height


def _square(value: Any) -> Any:
    """Older files write a square as one number."""
    return {"height": value, "width": value} if isinstance(value, int) else value


SizeField = Annotated[Size, BeforeValidator(_square)]
Channels = tuple[float, float, float]


class Preprocessing(Settings):
    """Resize, crop around the centre, x·rescale_factor, (x − mean)/std; each step can be off.

    What the file leaves out has the values that transformers gives a ViT.

    Attributes:
        do_resize: Whether the image is resized.
        size: To what.
        resample: By which of pillow's filters; 2 is bilinear.
        do_center_crop: Whether it is cropped.
        crop_size: To what.
        do_rescale: Whether bytes are multiplied.
        rescale_factor: By what.
        do_normalize: Whether channels are normalised.
        image_mean: The mean that is subtracted from each channel.
        image_std: The deviation by which each is divided.
    """

    do_resize: bool = True
    size: SizeField = Size(height=224, width=224)
    resample: int = Field(default=2, ge=0, le=5)
    do_center_crop: bool = False
    crop_size: SizeField = Size(height=224, width=224)
    do_rescale: bool = True
    rescale_factor: float = Field(default=1 / 255, gt=0)
    do_normalize: bool = True
    image_mean: Channels = (0.5, 0.5, 0.5)
    image_std: Channels = (0.5, 0.5, 0.5)

    @model_validator(mode="after")
    def _can_be_stacked(self) -> Self:
        if not self.do_center_crop and (not self.do_resize or self.size.shortest_edge is not None):
            raise ValueError("field size: gives images of different sizes, which make no batch")
        if self.do_center_crop and self.crop_size.shortest_edge is not None:
            raise ValueError("field crop_size: must be a number or height and width")
        if min(self.image_std) <= 0:
            raise ValueError("field image_std: must be more than 0")
        return self

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Self:
        """Read the known fields; a further step that is switched on is refused rather than left out.

        Args:
            config: The content of preprocessor_config.json.
            where: Whose it is, for messages.

        Returns:
            The checked settings.
        """
        for name, value in config.items():
            if name.startswith("do_") and value and name not in UNDERSTOOD:
                raise InputError(f"{where}: preprocessor_config.json needs {name}, which is not supported.")
        known = {name: config[name] for name in cls.model_fields if config.get(name) is not None}
        try:
            return cls(**known)
        except InputError as error:
            reason = str(error).removeprefix(f"{cls.__name__}: ")
            raise InputError(f"{where}: preprocessor_config.json: {reason}") from error

    def __call__(self, image: "Image") -> NDArray[np.float32]:
        """An RGB image as [3, height, width]."""
        from PIL.Image import Resampling

        if self.do_resize:
            image = image.resize(self.size.of(*image.size), Resampling(self.resample))
        if self.do_center_crop:
            width, height = self.crop_size.of(*image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))  # black where the image is smaller
        pixels: NDArray[np.float32] = np.asarray(image, dtype=np.float32)
        if self.do_rescale:
            pixels = pixels * np.float32(self.rescale_factor)
        if self.do_normalize:
            mean, std = (np.array(row, dtype=np.float32) for row in (self.image_mean, self.image_std))
            pixels = (pixels - mean) / std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
