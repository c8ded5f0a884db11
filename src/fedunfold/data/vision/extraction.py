"""One pass of a frozen backbone over a folder of images, which can be stopped and resumed."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from fedunfold.core.errors import InputError
from fedunfold.data.vision.backbone import Backbone
from fedunfold.data.vision.files import (
    About,
    Features,
    Skipped,
    StoredType,
    check_ending,
    load_features,
    read_about,
    save_features,
)
from fedunfold.data.vision.images import Batch, ImageFile, ImageFolder, read_ahead
from fedunfold.data.vision.partial import PartialResults

MODEL = "google/vit-base-patch16-224-in21k"
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True)
class Extraction:
    """What was made.

    Attributes:
        file: Where the features are.
        about: How they were made.
        features: The features.
        resumed: How many image files an earlier run had done; all of them where it was complete.
    """

    file: Path
    about: About
    features: Features
    resumed: int

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Class folders without a readable image; their numbers stay unused."""
        counts = np.bincount(self.features.y, minlength=len(self.features.classes))
        return tuple(name for name, count in zip(self.features.classes, counts, strict=True) if not count)


def extract(
    folder: str | Path,
    out: str | Path,
    *,
    model: str = MODEL,
    dtype: StoredType = "float16",
    batch_size: int = 32,
    device: str | torch.device = "cpu",
    again: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Extraction:
    """Store the features of every image in a folder.

    Each batch is saved in the folder `out`.partial as soon as it is done, so that the same call resumes where a stopped
    one ended. A finished file is returned as it is.

    Args:
        folder: Images at folder/class/….
        out: The file to write, .npz or .safetensors.
        model: A vision transformer of the Hugging Face hub, or a folder with one; its CLS token is the feature.
        dtype: The type in which features are stored.
        batch_size: Images in a forward pass.
        device: Where the model is evaluated.
        again: Make a finished file again, and discard partial results of other images or another model.
        on_progress: Receives the files done and all files.

    Returns:
        The features and how they were made.

    Raises:
        InputError: Folder, model, image or output file cannot be used; the message names it.
    """
    folder, out = Path(folder).expanduser(), Path(out).expanduser()
    check_ending(out)
    if dtype not in get_args(StoredType):
        raise InputError(f"features are stored as {' or '.join(get_args(StoredType))}, not {dtype}.")
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, not {batch_size}.")
    images = ImageFolder.scan(folder)
    label = Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model
    if out.exists() and not again:
        return _finished(out, label, images, dtype)
    backbone = Backbone.load(model, torch.device(device))
    recipe = {"model": label, "images": images.digest(), "backbone": backbone.digest}
    partial = PartialResults.opened(out.with_name(out.name + ".partial"), recipe, again)
    resumed = partial.done
    total = len(images.files)
    on_progress(resumed, total)
    with closing(read_ahead(images.files, batch_size, backbone.prepare, resumed)) as batches:
        for batch in batches:
            partial.add(_compute(batch, images.files, backbone))
            on_progress(partial.done, total)
    features, skipped = _join(images, partial.batches)
    about = About(**recipe, dtype=dtype, skipped=(*images.stray, *skipped))
    save_features(out, features, about)
    partial.discard()
    return Extraction(out, about, load_features(out), resumed)


def _finished(out: Path, model: str, images: ImageFolder, dtype: str) -> Extraction:
    """An earlier run's file, if it is what would be made now."""
    try:
        features, about = load_features(out), read_about(out)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; `again=True` makes it anew.") from error
    if about is None:
        other = "does not say how it was made"
    elif about.model != model:
        other = f"was made with the model {about.model}"
    elif about.images != images.digest():
        other = "was made from other images"
    elif about.dtype != dtype:
        other = f"was stored as {about.dtype}"
    else:
        return Extraction(out, about, features, len(images.files))
    raise InputError(f"{out} exists and {other}; choose another `out`, or replace it with `again=True`.")


def _compute(batch: Batch, files: Sequence[ImageFile], backbone: Backbone) -> Batch:
    """The batch with features in place of pixels."""
    if not len(batch.rows):
        return batch
    x = backbone.features(batch.x)
    finite = np.isfinite(x).all(axis=1)
    if not finite.all():
        name = files[batch.rows[int(np.argmin(finite))]].name
        raise InputError(f"the model gives {name} a NaN or infinite feature; check the model's weights.")
    return replace(batch, x=x)


def _join(images: ImageFolder, batches: Sequence[Batch]) -> tuple[Features, list[Skipped]]:
    """The features of all batches, and the files that have none."""
    skipped = [item for batch in batches for item in batch.skipped]
    full = [batch for batch in batches if len(batch.rows)]
    if not full:
        raise InputError(
            f"image folder {images.root}: none of its {len(images.files)} files can be read as an image "
            f"({skipped[0].name}: {skipped[0].reason})."
        )
    read = [images.files[row] for batch in full for row in batch.rows]
    features = Features(
        np.concatenate([batch.x for batch in full]),
        np.array([file.label for file in read], np.int64),
        tuple(file.name for file in read),
        images.classes,
    )
    return features, skipped
