"""Feature files: .npz or .safetensors, both with x, y, name and synset, neither ever unpickled.

`x[N, D]` are the features, `y[N]` the class numbers, `name[N]` the image files and `synset[C]` the classes in
the order of their numbers. A file made here also says how, in `about`; one made elsewhere need not.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as serialize

from fedunfold.core.errors import InputError
from fedunfold.data import arrays
from fedunfold.data.npz import NUMBERS_AND_TEXT, first_line, read_npz
from fedunfold.io.atomic import write_atomically
from fedunfold.io.safetensors import UNREADABLE, read_tensors

ENDINGS = (".npz", ".safetensors")
METADATA = "fedunfold.features"  # one entry only: safetensors writes several in no fixed order
KINDS = {"x": "f", "y": "ui", "name": "U", "synset": "U"}
KIND_WORDS = {"f": "floats", "ui": "integers", "U": "text"}

StoredType = Literal["float16", "float32"]


class Skipped(NamedTuple):
    """A file of the image folder that has no row.

    Attributes:
        name: Its path from the folder.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Features:
    """One row for each sample.

    Attributes:
        x: Features [N, D], all finite.
        y: Class numbers [N] in [0, C).
        names: The N image files.
        classes: The C classes in the order of their numbers.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    names: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class About:
    """How a file was made.

    Attributes:
        model: The backbone's name.
        images: A digest of the image folder.
        backbone: A digest of the weights and the preprocessing.
        dtype: The stored type.
        skipped: The files without features.
    """

    model: str
    images: str
    backbone: str
    dtype: str
    skipped: tuple[Skipped, ...]


def load_features(path: str | Path) -> Features:
    """Read and check a feature file, x as float32 and y as int64."""
    return _checked(Path(path), _read(Path(path)))


def read_about(path: Path) -> About | None:
    """How the file was made, where it says so."""
    columns = _read(path)
    try:
        fields = json.loads(str(columns["about"]))
        skipped = tuple(Skipped(str(name), str(reason)) for name, reason in fields.pop("skipped"))
        return About(**fields, skipped=skipped)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise InputError(f"{path}: a feature file ends in {' or '.join(ENDINGS)}; change its name.")


def save_features(path: Path, features: Features, about: About) -> None:
    """Write the file in one piece; the same content gives the same bytes."""
    check_ending(path)
    with np.errstate(over="ignore"):  # what is too large for float16 becomes inf and is named below
        x = features.x.astype(about.dtype)
    finite = np.isfinite(x).all(axis=1)
    if not finite.all():
        name = features.names[int(np.argmin(finite))]
        raise InputError(f"the features of {name} do not fit into {about.dtype}; store them in `dtype=float32`.")
    y = features.y.astype(np.min_scalar_type(len(features.classes) - 1))
    texts = {"name": features.names, "synset": features.classes, "about": json.dumps(asdict(about))}
    if path.suffix == ".npz":
        columns: dict[str, Any] = {name: np.array(text, dtype=np.str_) for name, text in texts.items()}
        write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, x=x, y=y, **columns))
        return
    content = serialize({"x": x, "y": y}, metadata={METADATA: json.dumps(texts)})
    write_atomically(path, lambda file: file.write_bytes(content))


def _read(path: Path) -> dict[str, NDArray[Any]]:
    check_ending(path)
    if path.suffix == ".npz":
        return read_npz(path, tuple(KINDS), optional=("about",), kinds=NUMBERS_AND_TEXT)
    try:
        columns, metadata = read_tensors(path, "numpy")
        texts = json.loads(metadata.get(METADATA, "{}"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; check the path.") from error
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); make it again.") from error
    for name in ("name", "synset", "about"):
        if isinstance(texts, Mapping) and name in texts:
            columns[name] = arrays.as_array(texts[name], f"{name} in {path}")
    for name in KINDS:
        if name not in columns:
            raise InputError(f"{path} has no {name}; extract the features again.")
    return columns


def _checked(path: Path, columns: Mapping[str, NDArray[Any]]) -> Features:
    for name, kind in KINDS.items():
        array, dimensions = columns[name], 2 if name == "x" else 1
        if array.ndim != dimensions:
            raise InputError(f"{name} in {path} has shape {array.shape}; it needs {dimensions} dimension(s).")
        if array.dtype.kind not in kind and array.size:
            raise InputError(f"{name} in {path} has type {array.dtype}; it must be {KIND_WORDS[kind]}.")
    classes = tuple(columns["synset"].tolist())
    if not classes or len(set(classes)) != len(classes):
        raise InputError(f"synset in {path} must name at least one class, and each once.")
    x = arrays.features({f"x in {path}": columns["x"]})[f"x in {path}"]
    y = arrays.labels(columns["y"], f"y in {path}", len(x), len(classes))
    if (named := len(columns["name"])) != len(x):
        raise InputError(f"name in {path} has {named} entries but x has {len(x)} rows; give one a row.")
    return Features(x, y, tuple(columns["name"].tolist()), classes)
