"""The coordinator makes one recipe of what all sites have told."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tomli_w

from fedunfold.consortium.description import ColumnDescription, Description
from fedunfold.consortium.moments import pool
from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.consortium.roster import Roster
from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS, task_text
from fedunfold.data.importers.cells import alike_spellings
from fedunfold.data.importers.classes import Classes
from fedunfold.data.importers.columns import note_order
from fedunfold.data.importers.findings import UNIT
from fedunfold.data.importers.recipe import NumberScale, list_features, refuse_large
from fedunfold.io.limits import TABLE_TEXTS

Sites = Mapping[str, ColumnDescription]
"""A column by the site that has it."""


def agree(
    descriptions: Sequence[Description],
    label: str,
    *,
    columns: Literal["all", "shared"] = "all",
    drop: Sequence[str] = (),
    positive: str | None = None,
) -> tuple[SiteRecipe, list[str]]:
    """One recipe for all sites.

    Gaps of numbers are filled with the mean over all sites, numbers standardised with mean and deviation of all sites'
    training rows (`pool`). A column with gaps, or that a site lacks, also gets a feature that says where it is missing.

    Args:
        descriptions: One of each site.
        label: The column to predict.
        columns: Whether to take all columns or only those that every site has.
        drop: Columns to leave out.
        positive: The one of two classes that gets the number 1.

    Returns:
        The recipe, and a sentence for each difference between the sites.

    Raises:
        InputError: Two descriptions contradict each other; the message names sites and column.

    >>> from cryptography.hazmat.primitives import serialization
    >>> from cryptography.hazmat.primitives.asymmetric import ec
    >>> from fedunfold.consortium.description import LabelDescription
    >>> from fedunfold.consortium.moments import Moments
    >>> from fedunfold.consortium.roster import RosterSite
    >>> openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    >>> def told(name, total):
    ...     key = ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(*openssh).decode()
    ...     age = ColumnDescription(
    ...         name="age", kind="number", missing=0, moments=Moments(count=8, sum=total, squares=392)
    ...     )
    ...     label = LabelDescription(name="ill", kind="classes", classes=("no", "yes"))
    ...     how = dict(rows=10, training_rows=8, test_fraction=0.2, seed=0, min_patients=5)
    ...     return Description(site=RosterSite(name=name, public_key=key), label=label, columns=(age,), **how)
    >>> recipe, notes = agree([told("a", 480.0), told("b", 400.0)], "ill")  # means 60 and 50, so 49 + 25 = 74
    >>> recipe.columns()["features"]
    [{'column': 'age', 'missing': 55.0, 'mean': 55.0, 'scale': 8.602325267042627}]
    """
    if len(descriptions) < 2:
        raise InputError("a consortium has two sites or more; give a description of each.")
    told = {own.site.name: own for own in sorted(descriptions, key=lambda own: own.site.name)}
    roster = Roster(sites=tuple(own.site for own in sorted(descriptions, key=lambda own: own.site.name)))
    for field in ("test_fraction", "seed"):
        _same(field, {name: getattr(own, field) for name, own in told.items()})
    _same("label", {name: own.label.name for name, own in told.items()}, label)
    notes = note_order({name: [column.name for column in own.columns] for name, own in told.items()})
    found = _columns(told, columns, drop, notes)
    parts: dict[str, NumberScale | Sequence[str]] = {}
    for name, at in found.items():
        made = _number(name, at, notes) if _kind(name, at) == "number" else _category(name, at, notes)
        if made is not None:
            parts[name] = made
    if not parts:
        raise InputError("no column is left as a feature; describe the tables again with other columns.")
    lacking = {name: tuple(site for site in told if site not in found[name]) for name in parts}
    gaps = {name for name in parts if lacking[name] or any(column.missing for column in found[name].values())}
    ids = {own.id for own in told.values()}
    recipe = SiteRecipe(
        roster=roster,
        label=label,
        id=ids.pop() if len(ids) == 1 else None,
        test_fraction=descriptions[0].test_fraction,
        seed=descriptions[0].seed,
        features=list_features(parts, gaps),  # type: ignore[arg-type]  # validated
        ranges=_ranges({name: found[name] for name in parts}),
        missing_at={name: sites for name, sites in lacking.items() if sites},
        **_target(told, label, positive, notes),
    )
    return recipe, notes


def run_settings(recipe: SiteRecipe, file: Path) -> str:
    """The settings of a run over Flower with the app of this project, as a TOML document.

    Args:
        recipe: The recipe.
        file: Its file.
    """
    settings = {
        "clients": " ".join(recipe.roster.names),
        "task": task_text(recipe.task),
        "recipe": str(file.resolve()),
        "recipe-checksum": recipe.checksum,
    }
    return "# The run config for Flower. Add other settings of the app, such as rounds = 20.\n" + tomli_w.dumps(
        settings
    )


def _same(field: str, values: Mapping[str, Any], wanted: Any = None) -> None:
    """Refuse sites that were described in different ways."""
    first, expected = next(iter(values.items()))
    for site, value in values.items():
        if wanted is not None and value != wanted:
            raise InputError(
                f"site {site} has described {value} as its {field}, not {wanted}; describe its table again."
            )
        if wanted is None and value != expected:
            raise InputError(
                f"sites {first} and {site} were described with another {field.replace('_', ' ')}, {expected} and "
                f"{value}; describe one of them again."
            )


def _columns(told: Mapping[str, Description], choice: str, drop: Sequence[str], notes: list[str]) -> dict[str, Sites]:
    """The columns to take in the order of their names, each with the sites that have a filled cell in it."""
    for name in drop:
        if not any(name == column.name for own in told.values() for column in own.columns):
            raise InputError(f"`drop`: column {name} is at no site; leave it out.")
    found: dict[str, dict[str, ColumnDescription]] = {}
    for site, own in told.items():
        for column in own.columns:
            if column.name not in drop:
                found.setdefault(column.name, {})[site] = column
    for alike in alike_spellings(sorted(found)):
        where = " and ".join(f"{name!r} ({next(iter(found[name]))})" for name in alike)
        raise InputError(
            f"the columns {where} differ by case or blanks only; name them alike at all sites, or `drop` one."
        )
    taken: dict[str, Sites] = {}
    for name in sorted(found):
        filled = {site: column for site, column in found[name].items() if column.kind != "empty"}
        lacking = [site for site in told if site not in filled]
        if not filled:
            notes.append(f"column {name} is empty at every site and was left out.")
        elif lacking and choice == "shared":
            notes.append(f"column {name} was left out: {_listed(lacking)} {_have(lacking)} no cell of it.")
        else:
            taken[name] = filled
            if lacking:
                notes.append(
                    f"column {name}: {_listed(lacking)} {_have(lacking)} no cell of it; it is filled in there, and a "
                    "feature says that it is missing."
                )
    return taken


def _kind(name: str, at: Sites) -> str:
    """What a column holds everywhere."""
    kinds = {column.kind: site for site, column in at.items()}
    if len(kinds) > 1:
        number, text = kinds["number"], kinds["category"]
        listed = at[text].categories
        example = repr(listed[0][:40]) if listed else "texts too rare to be told"
        raise InputError(
            f"column {name} holds numbers at {number} and texts at {text}, such as {example}; write numbers alone at "
            f"{text}, describe {number} again with {name} in `categorical`, or `drop` the column."
        )
    return next(iter(kinds))


def _number(name: str, at: Sites, notes: list[str]) -> NumberScale | None:
    """Mean and deviation over all sites that told their sums."""
    parts = {site: column.moments for site, column in at.items() if column.moments is not None}
    if not parts:
        notes.append(f"column {name} was left out: every site has too few cells of it to tell of them.")
        return None
    for site, own in parts.items():
        others = [part.mean for other, part in parts.items() if other != site]
        usual = median(others) if others else 0.0
        if own.mean * usual > 0 and not 1 / UNIT < own.mean / usual < UNIT:
            notes.append(
                f"column {name} has the mean {own.mean:.4g} at {site} and {usual:.4g} at the others; if that is "
                "another unit, convert it there and describe the table again."
            )
    mean, deviation = pool(list(parts.values()))
    refuse_large(name, max(abs(mean), deviation))
    return NumberScale(mean, mean, deviation or 1.0)


def _category(name: str, at: Sites, notes: list[str]) -> list[str] | None:
    """All texts that a site has listed."""
    texts = sorted({text for column in at.values() for text in column.categories})
    if not texts:
        notes.append(f"column {name} was left out: no site has a text of it often enough to tell it.")
        return None
    TABLE_TEXTS.check(len(texts), f"column {name} has many texts, `drop` it: ")
    for alike in alike_spellings(texts):
        listed = ", ".join(map(repr, alike))
        notes.append(f"column {name}: {listed} differ by case or blanks only and are a feature each; write them alike.")
    if rare := [site for site, column in at.items() if column.others]:
        notes.append(f"column {name}: {_listed(rare)} {_have(rare)} rarer texts too, which get no feature.")
    return texts


def _ranges(found: Mapping[str, Sites]) -> dict[str, tuple[float, float]]:
    told = {name: [own.range for own in at.values() if own.range is not None] for name, at in found.items()}
    return {
        name: (min(low for low, _ in ranges), max(high for _, high in ranges))
        for name, ranges in told.items()
        if ranges
    }


def _target(told: Mapping[str, Description], label: str, positive: str | None, notes: list[str]) -> dict[str, Any]:
    """The task, with the classes or the scale of its numbers."""
    kinds = {own.label.kind: site for site, own in told.items()}
    if len(kinds) > 1:
        raise InputError(
            f"column {label} is described as numbers at {kinds['number']} and as classes at {kinds['classes']}; "
            "describe one of them again with another `task`."
        )
    if "number" in kinds:
        if positive is not None:
            raise InputError("`positive` is about two classes and not about regression; leave it out.")
        parts = [own.label.moments for own in told.values() if own.label.moments is not None]
        if not parts:
            raise InputError(
                f"every site has too few rows to tell of {label}; describe them with fewer `min_patients`."
            )
        mean, deviation = pool(parts)
        return {"task": TASKS.make("regression"), "target": {"mean": mean, "scale": deviation or 1.0}}
    where: dict[str, list[str]] = {}
    for site, own in told.items():
        for name in own.label.classes:
            where.setdefault(name, []).append(site)
        if own.label.others:
            notes.append(f"{site} has rarer classes of {label} too; rows of a class that no site has told are refused.")
    if not where:
        raise InputError(f"no site has told a class of {label}; describe them with fewer `min_patients`.")
    # Every site has checked its own labels; what is left is how they fit together.
    classes = Classes.of(
        {name: sites[0] for name, sites in where.items()},
        label,
        rows=sum(own.rows for own in told.values()),
        categorical=any(own.label.categorical for own in told.values()),
        positive=positive,
    )
    notes += [f"class {name} of {label} is at {sites[0]} alone." for name, sites in where.items() if len(sites) == 1]
    task = TASKS.make("binary") if len(classes.names) == 2 else TASKS.make("classification", classes=len(classes.names))
    return {"task": task, "classes": classes.names}


def _listed(sites: Sequence[str]) -> str:
    return ", ".join(sites[:5]) + (", …" if len(sites) > 5 else "")


def _have(sites: Sequence[str]) -> str:
    return "has" if len(sites) == 1 else "have"
