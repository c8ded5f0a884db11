"""Feature files as .npz."""

from collections.abc import Mapping
from random import Random

import numpy as np

from fedunfold.data.vision.files import About, Features, Skipped, load_features, read_about, save_features
from fedunfold.data.vision.splitting import split, unit_rows
from tests.fuzz import mutation
from tests.fuzz.judging import scratch, understood, written

ENDING = ".npz"
ABOUT = About("tiny", "1" * 64, "2" * 64, "float16", (Skipped("a/odd.txt", "is no image"),))
FEATURES = Features(
    np.arange(40, dtype=np.float32).reshape(10, 4),
    np.array([0, 1] * 5),
    tuple(f"a/{i}.jpg" for i in range(10)),
    ("a", "b"),
)


def fuzz(data: bytes) -> bool:
    return read(data, ENDING)


def read(data: bytes, ending: str) -> bool:
    path = written(f"fuzzed{ending}", data)

    def use() -> None:
        read_about(path)
        split(unit_rows(load_features(path)), 0.2, 0)

    return understood(use, f"fuzzed{ending}", "class", "Class", "the features of")


def seeds() -> Mapping[str, bytes]:
    return made(ENDING)


def made(ending: str) -> Mapping[str, bytes]:
    found = {}
    for stored in ("float16", "float32"):
        path = scratch() / f"seed{ending}"
        save_features(path, FEATURES, About(ABOUT.model, ABOUT.images, ABOUT.backbone, stored, ABOUT.skipped))
        found[stored] = path.read_bytes()
    return found


def mutate(data: bytes, rng: Random) -> bytes:
    return mutation.of_archive(data, rng, {".npy": mutation.of_numpy})
