"""Images as root/client/class/…: every client's folder is an image folder of its own."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.importers.image_transform import ImageTransform
from fedunfold.data.importers.imported import ImportedData, Rows, client_keys, notes_on_rows, split_off_test, visible
from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import ImageFolder
from fedunfold.data.vision.reading import read_ahead

TEST = "test"
BATCH = 64
OnProgress = Callable[[int, int], object]


def subfolders(root: Path) -> list[Path]:
    """The folders in it, by name."""
    return [path for path in visible(root) if path.is_dir()]


def gather(
    root: Path,
    look: ImageTransform,
    test: float | Path,
    *,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> ImportedData:
    """Every client's images as rows. `test` is a folder of classes, or the fraction of each client's images.

    Classes are the class folders of all clients together, in alphabetical order.
    """
    held = ImageFolder.listed(test) if isinstance(test, Path) else None
    homes = {path.name: path for path in subfolders(root) if not (isinstance(test, Path) and path.samefile(test))}
    keys = client_keys({name: name for name in homes}, str(root))
    if not keys:
        raise InputError(f"{root}: has no client's folder; put images at {root}/client/class/.")
    folders = {key: ImageFolder.listed(homes[name]) for key, name in keys.items()}
    classes = tuple(sorted({name for folder in folders.values() for name in folder.classes}))
    if len(classes) < 2:
        raise InputError(f"{root}: the clients have only the class {classes[0]}; a classifier needs two.")
    if held is not None and (odd := sorted(set(held.classes) - set(classes))):
        raise InputError(f"{test}: no client has the class {odd[0]}; take its folder out of the test.")
    total = sum(len(folder.files) for folder in (*folders.values(), *((held,) if held else ())))
    done = 0
    skipped: list[Skipped] = []

    def read(folder: ImageFolder, where: Path) -> Rows:
        nonlocal done
        numbers = [classes.index(name) for name in folder.classes]
        stacks, labels = [], []
        skipped.extend(Skipped(str(where / name), reason) for name, reason in folder.stray)
        with closing(read_ahead(folder.files, BATCH, look.prepare)) as batches:
            for start, found in batches:
                seen = [
                    (item, folder.files[start + i]) for i, item in enumerate(found) if not isinstance(item, Skipped)
                ]
                skipped.extend(
                    Skipped(str(where / item.name), item.reason) for item in found if isinstance(item, Skipped)
                )
                if seen:
                    stacks.append(look.rows(np.stack([item for item, _ in seen])))
                    labels += [numbers[file.label] for _, file in seen]
                done += len(found)
                on_progress(done, total)
        if not stacks:
            raise InputError(f"image folder {where}: none of its {len(folder.files)} files can be read as an image.")
        return np.concatenate(stacks), np.array(labels, dtype=np.int64)

    rows = {key: read(folder, homes[keys[key]]) for key, folder in folders.items()}
    if isinstance(test, Path):
        assert held is not None
        train, tested = rows, read(held, test)
    else:
        train, tested = split_off_test(rows, classes, test, seed)
    notes = [look.note, *(f"skipped {name}: {reason}." for name, reason in skipped[:10])]
    if len(skipped) > 10:
        notes.append(f"{len(skipped) - 10} more files were skipped.")
    return ImportedData(train, tested, classes, (*notes, *notes_on_rows(train, tested, classes)))
