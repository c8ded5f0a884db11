"""Images as root/client/class/…: every client's folder is an image folder of its own."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.importers.image_transform import ImageTransform
from fedunfold.data.importers.imported import ImportedData, Rows, client_keys, note_thin_data, split_off_test
from fedunfold.data.vision.files import Skipped
from fedunfold.data.vision.images import ImageFolder, read_ahead, visible_entries

TEST = "test"
BATCH = 64
LISTED = 10  # skipped files that are named
OnProgress = Callable[[int, int], object]


def subfolders(root: Path) -> list[Path]:
    """The folders in it, by name."""
    return [path for path in visible_entries(root) if path.is_dir()]


def import_images(
    root: Path,
    transform: ImageTransform,
    test: float | Path,
    *,
    seed: int = 0,
    on_progress: OnProgress = lambda done, total: None,
) -> ImportedData:
    """Turn every client's images into rows.

    Args:
        root: Images at root/client/class/…; the classes of all clients are numbered in alphabetical order.
        transform: How an image becomes a row.
        test: A folder of classes to test on, or the fraction of each client's images of each class.
        seed: Draws the images of the test set.
        on_progress: Receives the files done and all files.

    Returns:
        The arrays; files that are no images are skipped, and noted.

    Raises:
        InputError: A folder has no images, or a class that no client has.
    """
    held = ImageFolder.scan(test) if isinstance(test, Path) else test
    homes = {path.name: path for path in subfolders(root) if not (isinstance(test, Path) and path.samefile(test))}
    keys = client_keys({name: name for name in homes}, str(root))
    if not keys:
        raise InputError(f"{root}: has no client's folder; put images at {root}/client/class/.")
    folders = {key: ImageFolder.scan(homes[name]) for key, name in keys.items()}
    classes = tuple(sorted({name for folder in folders.values() for name in folder.classes}))
    if len(classes) < 2:
        raise InputError(f"{root}: the clients have only the class {classes[0]}; a classifier needs two.")
    if isinstance(held, ImageFolder) and (odd := sorted(set(held.classes) - set(classes))):
        raise InputError(f"{test}: no client has the class {odd[0]}; take its folder out of the test.")
    total = sum(len(each.files) for each in (*folders.values(), held) if isinstance(each, ImageFolder))
    done = 0
    skipped: list[Skipped] = []

    def read(folder: ImageFolder) -> Rows:
        nonlocal done
        numbers = [classes.index(name) for name in folder.classes]
        stacks, labels, left_out = [], [], [*folder.stray]
        with closing(read_ahead(folder.files, BATCH, transform.prepare)) as batches:
            for batch in batches:
                if len(batch.rows):
                    stacks.append(transform.rows(batch.x))
                    labels += [numbers[folder.files[row].label] for row in batch.rows]
                left_out += batch.skipped
                done += batch.stop - batch.start
                on_progress(done, total)
        skipped.extend(Skipped(str(folder.root / name), reason) for name, reason in left_out)
        if not stacks:
            count = len(folder.files)
            raise InputError(f"image folder {folder.root}: none of its {count} files can be read as an image.")
        return np.concatenate(stacks), np.array(labels, dtype=np.int64)

    rows = {key: read(folder) for key, folder in folders.items()}
    given = read(held) if isinstance(held, ImageFolder) else held
    train, tested = split_off_test(rows, classes, given, seed)
    notes = [transform.note, *(f"skipped {name}: {reason}." for name, reason in skipped[:LISTED])]
    if len(skipped) > LISTED:
        notes.append(f"{len(skipped) - LISTED} more files were skipped.")
    return ImportedData(train, tested, classes, (*notes, *note_thin_data(train, tested, classes)))
