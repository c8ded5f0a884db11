"""One pass of a frozen backbone over a folder of images, which can be stopped and taken up again."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from fedunfold.core.errors import InputError
from fedunfold.data.vision.backbone import Backbone, require_extra
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
from fedunfold.data.vision.images import ImageFile, ImageFolder
from fedunfold.data.vision.partial import Batch, PartialResults
from fedunfold.data.vision.reading import Pixels, read_ahead

MODEL = "google/vit-base-patch16-224-in21k"
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True)
class Extraction:
    """What was made: `resumed` files were done by an earlier run, all of them where it was complete."""

    file: Path
    about: About
    features: Features
    resumed: int

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Class folders without a readable image; they keep their numbers."""
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
    on_progress: OnProgress | None = None,
) -> Extraction:
    """Store the CLS features of every image in `folder`/class/… as `out` (.npz or .safetensors).

    Each batch is kept in the folder `out`.partial as soon as it is done, so that the same call goes on where
    a stopped one left off. A finished file is returned as it is; `again` makes it anew, and also discards
    partial results of other images or another model. `on_progress` gets the files done and all files.
    """
    folder, out = Path(folder).expanduser(), Path(out).expanduser()
    check_ending(out)
    if dtype not in get_args(StoredType):
        raise InputError(f"features are stored as {' or '.join(get_args(StoredType))}, not {dtype}.")
    if batch_size < 1:
        raise InputError(f"the batch size must be at least 1, not {batch_size}.")
    images = ImageFolder.listed(folder)
    label = Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model
    if out.exists() and not again:
        return _finished(out, label, images, dtype)
    require_extra()
    backbone = Backbone.load(model, torch.device(device))
    recipe = {"model": label, "images": images.digest(), "backbone": backbone.digest}
    partial = PartialResults.opened(out.with_name(out.name + ".partial"), recipe, again)
    resumed = partial.done
    total = len(images.files)
    report = on_progress or (lambda done, total: None)
    report(resumed, total)
    with closing(read_ahead(images.files[resumed:], batch_size, backbone.preprocessing)) as batches:
        for start, read in batches:
            partial.add(_batch(resumed + start, read, images.files, backbone))
            report(partial.done, total)
    features, skipped = _gathered(folder, images, partial.batches)
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


def _batch(start: int, read: list[Pixels | Skipped], files: Sequence[ImageFile], backbone: Backbone) -> Batch:
    rows = [start + i for i, item in enumerate(read) if not isinstance(item, Skipped)]
    skipped = [item for item in read if isinstance(item, Skipped)]
    pixels = [item for item in read if not isinstance(item, Skipped)]
    x = backbone.features(np.stack(pixels)) if pixels else np.empty((0, 0), np.float32)
    finite = np.isfinite(x).all(axis=1)
    if not finite.all():
        name = files[rows[int(np.argmin(finite))]].name
        raise InputError(f"the model gives {name} a NaN or infinite feature; check the model's weights.")
    return Batch(start, start + len(read), np.array(rows, np.int64), x, tuple(skipped))


def _gathered(folder: Path, images: ImageFolder, batches: Sequence[Batch]) -> tuple[Features, list[Skipped]]:
    skipped = [item for batch in batches for item in batch.skipped]
    full = [batch for batch in batches if len(batch.rows)]
    if not full:
        raise InputError(
            f"image folder {folder}: none of its {len(images.files)} files can be read as an image "
            f"({skipped[0].name}: {skipped[0].reason})."
        )
    kept = [images.files[row] for batch in full for row in batch.rows]
    features = Features(
        np.concatenate([batch.x for batch in full]),
        np.array([file.label for file in kept], np.int64),
        tuple(file.name for file in kept),
        images.classes,
    )
    return features, skipped
