"""The batches that are done, saved beside the file they will become."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.npz import NUMBERS_AND_TEXT, read_npz
from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import Batch
from fedunfold.io.atomic import read_json, write_atomically

RECIPE = "recipe.json"
BATCH = "{:09d}-{:09d}.npz"
BATCHES = f"{'[0-9]' * 9}-{'[0-9]' * 9}.npz"


class PartialResults:
    """A folder with one .npz for each batch and the recipe they belong to; the batches cover files 0 … done−1.

    Batches need not be of one size: a run that ran out of memory may resume with smaller ones.

    Attributes:
        folder: Where they are.
        batches: Those that are done, without a gap from the first file on.
    """

    def __init__(self, folder: Path, batches: list[Batch]) -> None:
        self.folder = folder
        self.batches = batches

    @property
    def done(self) -> int:
        """How many files need no more work."""
        return self.batches[-1].stop if self.batches else 0

    @classmethod
    def opened(cls, folder: Path, recipe: Mapping[str, str], discard_others: bool) -> "PartialResults":
        """Resume from what a stopped run left.

        Args:
            folder: Where it may have left something.
            recipe: What the results are made of.
            discard_others: Whether results of another recipe are deleted instead of refused.

        Returns:
            The batches that are done.

        Raises:
            InputError: The folder holds results of another recipe.
        """
        if (folder / RECIPE).exists():
            difference = _difference(folder / RECIPE, recipe)
            if difference is None:
                return cls(folder, _read_batches(folder))
            if not discard_others:
                raise InputError(
                    f"{folder} holds the partial results of another run ({difference} differs); "
                    "start over with `again=True`, or choose another `out`."
                )
        results = cls(folder, [])
        results.discard()
        write_atomically(folder / RECIPE, lambda file: file.write_text(json.dumps(dict(recipe), indent=1)))
        return results

    def add(self, batch: Batch) -> None:
        """Save a batch that is done."""
        write_atomically(
            self.folder / BATCH.format(batch.start, batch.stop),
            lambda file: np.savez(
                file,
                allow_pickle=False,
                rows=batch.rows,
                x=batch.x,
                skipped=np.array(batch.skipped, dtype=np.str_).reshape(-1, 2),
            ),
        )
        self.batches.append(batch)

    def discard(self) -> None:
        """Remove what was written here, left-overs of a killed run included, and nothing else."""
        for pattern in (RECIPE, BATCHES, f".{Path(RECIPE).stem}-*", ".[0-9]*.npz"):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            self.folder.rmdir()


def _difference(file: Path, recipe: Mapping[str, str]) -> str | None:
    """The first part of the recipe that the file does not have."""
    try:
        found = read_json(file)
        return next((name for name, value in recipe.items() if found[name] != value), None)
    except (OSError, ValueError, LookupError, TypeError):
        return RECIPE


def _read_batches(folder: Path) -> list[Batch]:
    """The batches from the first file on; what comes after a gap or a damaged one is computed again."""
    batches: list[Batch] = []
    for file in sorted(folder.glob(BATCHES)):
        start, stop = (int(part) for part in file.stem.split("-"))
        try:
            arrays = read_npz(file, ("rows", "x", "skipped"), kinds=NUMBERS_AND_TEXT)
            whole = arrays["skipped"].shape[1:] == (2,) and arrays["rows"].shape == arrays["x"].shape[:1]
        except InputError:  # cut short when the machine stopped
            whole = False
        if not whole or start != (batches[-1].stop if batches else 0):
            file.unlink()
            continue
        skipped = tuple(Skipped(name, reason) for name, reason in arrays["skipped"].tolist())
        batches.append(Batch(start, stop, arrays["rows"], arrays["x"], skipped))
    return batches
