"""Own data as users have them, made on the spot: four hospitals' CSV files, folders of images, .npz files."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HOSPITALS = {
    "Hospital A": ("home", "transfer"),
    "north": ("home", "transfer"),
    "south": ("home", "transfer"),
    "west": ("died", "home"),
}


def hospitals(folder: Path, rows: int = 30) -> Path:
    """One CSV a hospital; the columns are in another order everywhere, some cells are empty, and one ward is text."""
    stream = np.random.default_rng(0)
    folder.mkdir(parents=True)
    columns = ["age", "pressure", "ward", "outcome"]
    for position, (name, outcomes) in enumerate(HOSPITALS.items()):
        order = columns[position:] + columns[:position]
        lines = [",".join(order)]
        for i in range(rows + 10 * position):
            outcome = outcomes[i % 2]
            row = {
                "age": f"{stream.normal(80 if outcome == 'died' else 50, 10):.1f}",
                "pressure": "" if i % 9 == 8 else f"{stream.normal(140 if outcome == 'transfer' else 110, 10):.0f}",
                "ward": "icu" if stream.random() < 0.5 else "er",
                "outcome": outcome,
            }
            lines.append(",".join(row[column] for column in order))
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def scans(root: Path, images: int = 6) -> Path:
    """Light and dark pictures at two clinics."""
    stream = np.random.default_rng(0)
    for clinic in ("east", "west"):
        for name, level in (("clear", 60), ("cloudy", 180)):
            (root / clinic / name).mkdir(parents=True)
            for i in range(images):
                pixels = stream.integers(level - 50, level + 50, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / clinic / name / f"{i}.png")
    return root


def arrays(path: Path, *owners: str) -> Path:
    """An .npz with x_<owner> and y_<owner> for each, the test among them."""
    stream = np.random.default_rng(0)
    pairs: dict[str, Any] = {
        owner: (stream.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2) for owner in (*owners, "test")
    }
    np.savez(path, **{f"{axis}_{owner}": pair[i] for owner, pair in pairs.items() for i, axis in enumerate("xy")})
    return path
