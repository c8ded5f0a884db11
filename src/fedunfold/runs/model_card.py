"""The card beside a trained model: its data, how it was trained, how well it does at each site, and its limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedunfold.config import Environment
from fedunfold.core.run_result import RunResult
from fedunfold.core.task import finite, words
from fedunfold.core.text_table import markdown_table
from fedunfold.rules.rule import describe_rule
from fedunfold.runs.labels import plain
from fedunfold.runs.trained_model import ModelRecord
from fedunfold.training.methods import Method
from fedunfold.version import VERSION

SHOWN_CLASSES = 10
"""More have no column of their own."""
FEW = 100
"""Held-out rows below which a site's figure moves by more than a point with a single row."""


@dataclass(frozen=True)
class Site:
    """A client as the card shows it.

    Attributes:
        key: Its name.
        samples: How many rows it trained on.
        label_counts: How many of them are of each class; one number for a task without classes.
        held_out: How many rows it held out.
    """

    key: str
    samples: int
    label_counts: Sequence[int]
    held_out: int


def sites_of(environment: Environment) -> list[Site]:
    """The clients of an environment whose data are here."""
    data, kept = environment.load(), environment.load_held_out()
    held = [0] * len(data.keys) if kept is None else kept.sizes
    return [Site(*each) for each in zip(data.keys, data.sizes, data.label_counts.tolist(), held, strict=True)]


def model_card(
    environment: Environment,
    method: Method,
    result: RunResult,
    record: ModelRecord,
    module: nn.Module,
    sites: Sequence[Site],
    tested_on: str,
) -> str:
    """The card, in Markdown; every figure is the run's.

    Args:
        environment: What it was trained on.
        method: How.
        result: What came out, with the held-out scores of the clients that have some.
        record: What the model is.
        module: The model.
        sites: The clients.
        tested_on: What the test rows are, such as "the test set, 114 rows".
    """
    assert method.rule is not None
    primary, last = result.evaluations[-1].primary, result.evaluations[-1]
    factor, unit = primary.factor(), primary.brackets()
    classes = record.class_names or tuple(map(str, range(record.task.num_groups)))
    by_class = tuple(map(plain, classes)) if 1 < len(classes) <= SHOWN_CLASSES else ()
    held = [
        (plain(site.key), site.held_out, primary.text(factor * score) if finite(score) is not None else "not known")
        for site in sites
        if (score := result.held_out.get(site.key)) is not None
    ]
    rule = describe_rule(method.rule)
    checksum = rule["parameters"] or rule["weights"]
    trained = [
        ("method", method.name),
        ("rule", rule["rule"]),
        ("SHA-256 of the rule's numbers", checksum or "none: the rule is a formula without any"),
        *((name.replace("_", " "), _text(value)) for name, value in method.algorithm.describe().items()),
        ("rounds", len(result.scores)),
        ("samples in a local step", environment.batch_size),
        ("local learning rate", environment.lr),
        ("seed", environment.seed),
    ]
    shapes = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
    shown = primary.shown(last.score, last.metrics)
    tests = [(name, "not known" if v is None else primary.text(v, name)) for name, v in shown.items()]
    return f"""# {plain(method.name)} on {plain(environment.name)}

{_text(record.task.describe())}; rows of shape {list(record.features)}. Made with fedunfold {VERSION}.

`model.safetensors` has the parameters by name, `model.json` the architecture, the names of the classes, and how the
columns of a table become features. `fedunfold predict FOLDER rows.csv`, `fedunfold export FOLDER` and, in Python,
`fedunfold.load_model(FOLDER)` read them.

## Data

{_line(environment.description) or "No description was given."}

{
        markdown_table(
            ("client", "training rows", "held-out rows", *by_class),
            [
                (plain(site.key), site.samples, site.held_out, *(site.label_counts if by_class else ()))
                for site in sites
            ],
        )
    }
Preprocessing: {_preprocessing(record)}

## How it was trained

{markdown_table(("", "value"), trained)}
## On the test rows

Tested on {tested_on}, after the last round.

{markdown_table(("metric", "value"), [(words(name) + primary.brackets(name), value) for name, value in tests])}
## At each site, on rows that it held out

{
        markdown_table(("client", "held-out rows", primary.label + unit), held)
        if held
        else "Nothing is known: no client held out rows that the model was tested on."
    }
## Parameters

{markdown_table(("name", "shape"), [(name, " × ".join(map(str, shape)) or "a number") for name, shape in shapes])}
## Limits

{"".join(f"- {limit}" + chr(10) for limit in _limits(result, record, sites, tested_on))}"""


def _limits(result: RunResult, record: ModelRecord, sites: Sequence[Site], tested_on: str) -> list[str]:
    """What the figures do not say, by what the run was."""
    scores = [score for score in result.held_out.values() if finite(score) is not None]
    found = ["It was measured on rows of the clients above alone; at another site it may do worse."]
    if len(scores) < len(sites):
        found.append(
            f"{len(sites) - len(scores)} of {len(sites)} clients have no held-out figure: whom it serves badly is not "
            "known."
        )
    if few := [site.key for site in sites if 0 < site.held_out < FEW]:
        found.append(f"Fewer than {FEW} rows were held out at {', '.join(few)}: those figures are rough.")
    if "training" in tested_on:
        found.append("It was tested on rows that it was trained on, which flatters it.")
    if record.task.num_groups > 1:
        found.append("Whether its probabilities are calibrated was not measured.")
    found.append("It is one run; how much another seed would change it was not measured.")
    if result.rejected:
        names = ", ".join(sorted({entry.client for entry in result.rejected}))
        found.append(f"Updates of {names} were rejected in some rounds.")
    return [*found, *map(_line, result.warnings)]


def _preprocessing(record: ModelRecord) -> str:
    """Which columns it reads, where the data came from a table."""
    if record.columns is None:
        return "none on record; rows have to be as in training."
    names = dict.fromkeys(entry["column"] for entry in record.columns["features"])
    return f"{len(names)} columns become {len(record.columns['features'])} features: {', '.join(map(plain, names))}."


def _text(value: Any) -> str:
    """A part's name and settings in one line."""
    if isinstance(value, Mapping):
        settings = ", ".join(f"{key} {setting}" for key, setting in value.items() if key != "name")
        return f"{value.get('name', '')}{f' ({settings})' if settings else ''}"
    return "none" if value in (None, ()) else str(value)


def _line(text: str) -> str:
    """A text of people's on one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
