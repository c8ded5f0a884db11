"""Imported data as one .npz, which the partition 'given' reads, and the recipe beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedunfold.data.importers.imported import ImportedData
from fedunfold.io.atomic import write_atomically


def write_npz(path: Path, imported: ImportedData) -> None:
    """Write x_<client> and y_<client> for every client and for the test.

    Args:
        path: The file; equal data give equal bytes.
        imported: The data.
    """
    owners = {**imported.clients, "test": imported.test}
    arrays: dict[str, Any] = {
        f"{axis}_{owner}": pair[i] for owner, pair in owners.items() for i, axis in enumerate("xy")
    }
    write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))


def write_recipe(path: Path, imported: ImportedData) -> None:
    """Write how a raw row becomes features, as JSON.

    Args:
        path: The file.
        imported: Data of tables.
    """
    text = json.dumps(imported.recipe, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
