"""What a stopped extraction of features left behind; what is damaged is computed again."""

import io
import json
import shutil
import zipfile
from collections.abc import Mapping
from random import Random

import numpy as np

from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import Batch
from fedunfold.data.vision.partial import PartialResults
from tests.fuzz import mutation
from tests.fuzz.judging import scratch, understood

RECIPE = {"model": "tiny", "images": "1" * 64}
FILES = ("recipe.json", "000000000-000000003.npz")


def fuzz(data: bytes) -> bool:
    folder = scratch() / "partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                if name in FILES:
                    (folder / name).write_bytes(archive.read(name))
    except Exception:  # not a folder at all
        return False
    return understood(lambda: PartialResults.opened(folder, RECIPE, discard_others=True).done, "partial")


def seeds() -> Mapping[str, bytes]:
    folder = scratch() / "seed-partial"
    shutil.rmtree(folder, ignore_errors=True)
    results = PartialResults.opened(folder, RECIPE, discard_others=True)
    results.add(Batch(0, 3, np.array([0, 2]), np.ones((2, 4), np.float32), (Skipped("a/1.jpg", "is no image"),)))
    batch = (folder / FILES[1]).read_bytes()
    return {"one-batch": mutation.zipped([(FILES[0], json.dumps(RECIPE).encode()), (FILES[1], batch)])}


def mutate(data: bytes, rng: Random) -> bytes:
    def batch(content: bytes, rng: Random) -> bytes:
        return mutation.of_archive(content, rng, {".npy": mutation.of_numpy})

    return mutation.of_archive(data, rng, {".json": mutation.of_json, ".npz": batch})
