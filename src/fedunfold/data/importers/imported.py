"""What every reader of own data makes: arrays by client, a test set, the classes' names, and notes for the user."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.data.arrays import Labels
from fedunfold.data.vision.splitting import held_out

Rows = tuple[NDArray[Any], Labels]
RESERVED = ("test", "train")  # x_test and x_train in the .npz are no client's


@dataclass(frozen=True, eq=False)
class ImportedData:
    """(x, y) by client and for the test; classes in the order of their numbers; what the user should know.

    `recipe` says how a raw row becomes features, so that the trained model can be used on new rows.
    """

    clients: Mapping[str, Rows]
    test: Rows
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] | None = None


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, by name; hidden entries are left out, as file managers leave them."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}).") from error


def client_key(name: str) -> str:
    """A file's or folder's name as a client's key: what is no letter, digit, dot or underscore becomes a dash.

    >>> client_key("Hospital A (west)")
    'Hospital-A-west'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-")[:64]


def client_keys(names: Mapping[str, str], where: str) -> dict[str, str]:
    """Which entry of `where` is behind every key, in the keys' order; `names` has each entry's name without ending.

    Names that make the same key, none, or one that the .npz needs for itself are refused.
    """
    found: dict[str, str] = {}
    for entry, name in names.items():
        key = client_key(name)
        if not key:
            raise InputError(f"{where}: the name of {entry!r} makes no client key; use letters and digits.")
        if key.lower() in RESERVED:
            raise InputError(f"{where}: no client can be called {key}; rename {entry}.")
        if key in found:
            raise InputError(f"{where}: {found[key]} and {entry} both make the client {key}; rename one.")
        found[key] = entry
    return dict(sorted(found.items()))


def masks_for_test(
    labels: Mapping[str, Labels], classes: tuple[str, ...], fraction: float, seed: int
) -> dict[str, NDArray[np.bool_]]:
    """Which rows of each client go to the test: `fraction` of the rows of each of its classes, rounded.

    A class that a client has keeps at least one row there for training. Which rows is drawn by (seed, client,
    class), so that another client's data do not change it.
    """
    if not 0 < fraction < 1:
        raise InputError(f"--test: the fraction must lie between 0 and 1, not {fraction:g}.")
    masks = {key: held_out(y, classes, fraction, seed, "own-test", key) for key, y in labels.items()}
    if not any(mask.any() for mask in masks.values()):
        raise InputError(
            f"--test: a fraction of {fraction:g} leaves no test row in clients this small; "
            "raise it, or give a test set of its own."
        )
    return masks


def split_off_test(
    clients: Mapping[str, Rows], classes: tuple[str, ...], fraction: float, seed: int
) -> tuple[dict[str, Rows], Rows]:
    """The clients' training rows, and one test set of what each of them gave up."""
    masks = masks_for_test({key: y for key, (_, y) in clients.items()}, classes, fraction, seed)
    train = {key: (x[~masks[key]], y[~masks[key]]) for key, (x, y) in clients.items()}
    x_test, y_test = (np.concatenate([pair[i][masks[key]] for key, pair in clients.items()]) for i in (0, 1))
    return train, (x_test, y_test)


def notes_on_rows(clients: Mapping[str, Rows], test: Rows, classes: tuple[str, ...]) -> list[str]:
    """What is thin: clients of one training row, classes without a test row."""
    notes = [f"client {key} has a single training row." for key, (_, y) in clients.items() if len(y) == 1]
    untested = sorted(set(range(len(classes))) - set(test[1].tolist()))
    if untested:
        names = ", ".join(classes[label] for label in untested[:5]) + (", …" if len(untested) > 5 else "")
        notes.append(f"the test set has no row of class {names}: how well it is learned will not be seen.")
    return notes
