"""What every importer makes: arrays by client, a test set, the classes' names, and notes for the user.

They are written as one .npz, which the partition 'given' reads, and the recipe beside it.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedunfold.core.errors import InputError
from fedunfold.core.task import Task
from fedunfold.data.arrays import Labels
from fedunfold.data.vision.splitting import held_out
from fedunfold.io.atomic import write_atomically

Rows = tuple[NDArray[Any], NDArray[Any]]
RESERVED = ("test", "train")  # x_test and x_train in the .npz are no client's


@dataclass(frozen=True)
class Finding:
    """Something in the data that may be a mistake.

    Attributes:
        kind: A word for it, such as `constant`.
        message: Where it is, and what to do.
    """

    kind: str
    message: str


@dataclass(frozen=True, eq=False)
class ImportedData:
    """Arrays for an environment.

    Attributes:
        clients: (x, y) by client.
        test: (x, y) of the test set.
        classes: The classes' names in the order of their numbers.
        notes: What the user should know.
        recipe: How a raw row becomes features, so that the trained model can be used on new rows; None for images.
        task: What a model is trained for; without it, classification.
        findings: What may be a mistake in the data.
    """

    clients: Mapping[str, Rows]
    test: Rows
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] | None = None
    task: Task | None = None
    findings: tuple[Finding, ...] = ()


def client_key(name: str) -> str:
    """A file's or folder's name as a client's key: what is no letter, digit, dot or underscore becomes a dash.

    >>> client_key("Hospital A (west)"), client_key("Zürich")
    ('Hospital-A-west', 'Zürich')
    """
    return re.sub(r"[^\w.]+", "-", unicodedata.normalize("NFC", name)).strip("-")[:64]


def client_keys(names: Mapping[str, str], where: str) -> dict[str, str]:
    """Give every entry of a folder or column a client's key.

    Args:
        names: The name of each entry, without its ending.
        where: What holds the entries, for messages.

    Returns:
        The entry of every key, in the keys' order.

    Raises:
        InputError: Two names make the same key, or one makes none, or one that the .npz needs for itself.
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


def split_off_test(
    clients: Mapping[str, Rows],
    classes: tuple[str, ...],
    test: Rows | float,
    seed: int,
    concatenate: Callable[[list[Any]], Any] = np.concatenate,
    groups: Callable[[NDArray[Any]], Labels] | None = None,
) -> tuple[Mapping[str, Rows], Rows]:
    """Take a part of every client's rows for the test, where there is no test set.

    Args:
        clients: (x, y) by client.
        classes: Their names.
        test: A test set, or the part of the rows of each of a client's classes, rounded; a class keeps one row for
            training. Which rows is drawn by (seed, client, class), so that another client's data do not change it.
        seed: Draws the rows.
        concatenate: Joins the clients' x.
        groups: From targets that are no class numbers to numbers that stand for them here.

    Returns:
        The training rows by client, and the test set.

    Raises:
        InputError: The fraction is out of range, or leaves no test row.
    """
    if isinstance(test, tuple):
        return clients, test
    if not 0 < test < 1:
        raise InputError(f"`test`: the fraction must lie between 0 and 1, not {test:g}.")
    held = {key: y if groups is None else groups(y) for key, (_, y) in clients.items()}
    masks = {key: test_rows(y, classes, test, seed, key) for key, y in held.items()}
    if not any(mask.any() for mask in masks.values()):
        raise InputError(
            f"`test`: a fraction of {test:g} leaves no test row in clients this small; "
            "raise it, or give a test set of its own."
        )
    train = {key: (x[~masks[key]], y[~masks[key]]) for key, (x, y) in clients.items()}
    x_test = concatenate([x[masks[key]] for key, (x, _) in clients.items()])
    return train, (x_test, np.concatenate([y[masks[key]] for key, (_, y) in clients.items()]))


def test_rows(y: Labels, classes: Sequence[str], fraction: float, seed: int, client: str) -> NDArray[np.bool_]:
    """Draw the rows of a client that are for the test, of each of its classes.

    Args:
        y: Class numbers.
        classes: Their names; which rows of a class are drawn does not depend on the others.
        fraction: The part of its rows, rounded; a class keeps one row for training.
        seed: Draws them, by (seed, client, class).
        client: Whose rows they are.
    """
    return held_out(y, classes, fraction, seed, "own-test", client)


def note_thin_data(clients: Mapping[str, Rows], test: Rows, classes: tuple[str, ...]) -> list[str]:
    """Notes on clients of one training row and classes without a test row."""
    notes = [f"client {key} has a single training row." for key, (_, y) in clients.items() if len(y) == 1]
    untested = sorted(set(range(len(classes))) - set(test[1].tolist())) if classes else []
    if untested:
        names = ", ".join(classes[label] for label in untested[:5]) + (", …" if len(untested) > 5 else "")
        notes.append(f"the test set has no row of class {names}: how well it is learned will not be seen.")
    return notes


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
