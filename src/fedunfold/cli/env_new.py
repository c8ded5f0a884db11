"""`fedunfold env new`: an environment file from own data."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt
from fedunfold.cli.prompts import Answers, by_client, widths
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.cli.import_source import ImportSummary
    from fedunfold.config import Environment


Column = typer.Option(metavar="COLUMN")
SHOWN = 20  # findings
Positive = Annotated[int | None, typer.Option(min=1)]


def new(
    source: Annotated[Path | None, typer.Argument(metavar="[SOURCE]")] = None,
    dataset: str | None = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    name: str | None = None,
    label: Annotated[str | None, Column] = None,
    task: Literal["classification", "binary", "regression", "survival"] | None = None,
    time: Annotated[str | None, Column] = None,
    event: Annotated[str | None, Column] = None,
    test: Annotated[str | None, typer.Option(metavar="FRACTION|FILE")] = None,
    drop: Annotated[list[str] | None, Column] = None,
    categorical: Annotated[list[str] | None, Column] = None,
    id: Annotated[str | None, Column] = None,
    positive: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    missing_indicators: Annotated[bool, typer.Option("--missing-indicators")] = False,
    scaling: Literal["standard", "none"] | None = None,
    size: Annotated[int | None, typer.Option(min=1, max=512)] = None,
    colour: Literal["grey", "rgb"] | None = None,
    model: str | None = None,
    partitioner: opt.Part = None,
    clients: Positive = None,
    rounds: Positive = None,
    batch_size: Positive = None,
    lr: float | None = None,
    epochs: Annotated[list[str] | None, typer.Option(metavar="[CLIENT=]N")] = None,
    hidden: str | None = None,
    participation_probability: Annotated[list[str] | None, typer.Option(metavar="[CLIENT=]P")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overwrite: bool = False,
    yes: bool = False,
    output: opt.Format = "text",
) -> None:
    """Write an environment for your own data, and the data as one .npz where they are not.

    What is not given is requested on a terminal, with a default; elsewhere the default is taken.

    Args:
        source: An .npz, a folder of CSVs (one a client), or images: client/class/…
        dataset: Instead: a Hugging Face data set, or its local files.
        out: The environment to write; data go beside it.
        name: What the environment is called.
        label: The column to predict.
        task: What is predicted; by default what the column looks like.
        time: For survival: the column of the times.
        event: For survival: the column of the events, 0 or 1.
        test: Part of each client's rows to test on, or the file, folder or split.
        drop: A column to leave out.
        categorical: A column of categories, whatever its cells look like.
        id: The column that tells rows apart: no feature.
        positive: The one of two classes that is 1.
        missing_indicators: Add a 0/1 feature for numbers that are missing.
        scaling: Whether numbers are standardised; standard.
        size: Pixels a side that images are made; 28.
        colour: Which pixels are taken; grey.
        model: Features of this vision transformer in place of pixels (extra vision).
        partitioner: How undivided data are partitioned: iid, dirichlet:alpha=0.3, …
        clients: Among how many clients.
        rounds: Rounds of training.
        batch_size: Samples in a local step.
        lr: Local learning rate.
        epochs: Local epochs of all, or of one client.
        hidden: Widths of hidden layers: 32 or 64,32 or none.
        participation_probability: How likely clients take part in a round.
        seed: Draws the test rows, the partition and the training.
        overwrite: Replace existing files.
        yes: Ask nothing; take the defaults.
    """
    from fedunfold.cli.import_source import WORDS, ImportSource
    from fedunfold.config import Client, Environment, ModelSpec
    from fedunfold.data.config import NpzSource

    given = {"label": label, "test": test, "drop": drop, "scaling": scaling, "size": size, "colour": colour}
    given |= {"task": task, "time": time, "event": event}
    given |= {"categorical": categorical, "id": id, "positive": positive, "missing_indicators": missing_indicators}
    given |= {"model": model, "partitioner": partitioner, "clients": clients}
    answers = Answers(yes or output == "json")
    own = ImportSource.of(source, dataset, given, answers, seed)
    name = answers.about("--name", "name of the environment", name, own.default_name(), str)
    out = _free(out or Path(f"{own.file_name(name)}.toml"), own.kind != "npz", overwrite)
    found = own.find(out)
    epochs_of_all, own_epochs = by_client("--epochs", epochs or (), int)
    probability_of_all, own_probability = by_client(
        "--participation-probability", participation_probability or (), float
    )
    for option, single in (("--epochs", own_epochs), ("--participation-probability", own_probability)):
        for client in sorted(single.keys() - set(found.data.keys)):
            raise InputError(f"{option}: there is no client {client}, only {', '.join(found.data.keys)}.")
    training: dict[str, Any] = {"rounds": rounds, "batch_size": batch_size, "lr": lr, "epochs": epochs_of_all}
    training = _training(answers, found, {**training, "hidden": hidden and widths(hidden)})
    epochs_of_all, layers = training.pop("epochs"), training.pop("hidden")
    probability = 1.0 if probability_of_all is None else probability_of_all
    env = Environment(
        name=name,
        description=f"Made from {WORDS[own.kind]}.",
        seed=seed,
        class_names=(found.classes or None) if found.imported is not None else None,
        task=found.task,
        model=ModelSpec(hidden=layers),
        data=NpzSource(path=found.path),
        partition=found.partition,
        clients=tuple(
            Client(
                key=key,
                epochs=own_epochs.get(key, epochs_of_all),
                participation_probability=own_probability.get(key, probability),
            )
            for key in found.data.keys
        ),
        **training,
    )
    files = _write(out, env, found)
    _tell(out, found, files, output)


def _free(out: Path, with_data: bool, overwrite: bool) -> Path:
    """Refuse before any work what would be lost."""
    if out.suffix != ".toml":
        raise InputError(f"--out {out}: an environment's file ends in .toml; name it so.")
    for path in (out, *((out.with_suffix(".npz"), _recipe(out)) if with_data else ())):
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists already; choose another --out, or replace it with --overwrite.")
    return out


def _recipe(out: Path) -> Path:
    return out.with_suffix(".columns.json")


def _training(answers: Answers, found: "ImportSummary", given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given or answered, or else what suits the data."""
    from fedunfold.config.template import suggest_training

    suggested = suggest_training(found.data.sizes, found.data.x[0].numel())
    questions = (
        ("rounds", "--rounds", "rounds of training", int),
        ("batch_size", "--batch-size", "samples in a local step", int),
        ("lr", "--lr", "local learning rate", float),
        ("epochs", "--epochs", "local epochs a round", int),
        ("hidden", "--hidden", "widths of hidden layers, or none", widths),
    )
    return {
        field: answers.about(option, question, given[field], suggested[field], read)
        for field, option, question, read in questions
    }


def _write(out: Path, env: "Environment", found: "ImportSummary") -> list[Path]:
    """The environment, after its data."""
    from fedunfold.config.template import to_commented_toml
    from fedunfold.data.importers.imported import write_npz, write_recipe
    from fedunfold.io.atomic import write_atomically

    text = to_commented_toml(env)
    imported = found.imported
    files = [out]

    def write(temporary: Path) -> None:
        """The file is on the disk before the data take their place, and takes its own last."""
        temporary.write_text(text, encoding="utf-8")
        if imported is None:
            return
        write_npz(out.with_suffix(".npz"), imported)
        files.append(out.with_suffix(".npz"))
        if imported.recipe is not None:
            write_recipe(_recipe(out), imported)
            files.append(_recipe(out))

    write_atomically(out, write)
    return files


def _tell(out: Path, found: "ImportSummary", files: Sequence[Path], output: opt.Format) -> None:
    data = found.data
    test_samples, features = len(data.y_test), data.x[0].numel()
    commands = [shlex.join(["fedunfold", *words, str(out)]) for words in (("env", "check"), ("learn",))]
    if output == "json":
        console.print_json(
            {
                "files": [str(path) for path in files],
                "clients": dict(zip(data.keys, data.sizes, strict=True)),
                "test_samples": test_samples,
                "features": features,
                "task": data.task.name,
                "classes": found.classes,
                "notes": list(found.notes),
                "findings": [asdict(finding) for finding in found.findings],
                "next": commands,
            }
        )
        return
    for note in found.notes:
        console.say(note)
    for finding in found.findings[:SHOWN]:
        console.warn(finding.message)
    if len(found.findings) > SHOWN:
        console.warn(f"{len(found.findings) - SHOWN} more findings like these; --format json has all.")
    console.say(
        f"wrote {', '.join(map(str, files))}: {len(data.keys)} clients, {sum(data.sizes)} training and "
        f"{test_samples} test samples, {features} features, {opt.task_in_words(data.task)}."
    )
    console.say("next:")
    for command in commands:
        console.say(f"  {command}")
