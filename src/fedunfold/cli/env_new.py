"""`fedunfold env new`: an environment file from own data."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedunfold.cli import options as opt
from fedunfold.cli.prompts import Answers, by_client, widths
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.cli.import_source import ImportSummary
    from fedunfold.config import Environment


def _option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(f"--{name}", help=help, **more)


def new(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SOURCE]", help="An .npz, a folder of CSVs (one a client), or images: client/class/…"),
    ] = None,
    dataset: Annotated[str | None, _option("dataset", "Instead: a Hugging Face data set, or its local files.")] = None,
    out: Annotated[Path | None, _option("out", "The environment to write; data go beside it.", metavar="FILE")] = None,
    name: Annotated[str | None, _option("name", "What the environment is called.")] = None,
    label: Annotated[str | None, _option("label", "The column to predict.", metavar="COLUMN")] = None,
    test: Annotated[
        str | None,
        _option(
            "test", "Part of each client's rows to test on, or the file, folder or split.", metavar="FRACTION|FILE"
        ),
    ] = None,
    drop: Annotated[list[str] | None, _option("drop", "A column to leave out.", metavar="COLUMN")] = None,
    scaling: Annotated[
        Literal["standard", "none"] | None, _option("scaling", "Whether numbers are standardised; standard.")
    ] = None,
    size: Annotated[int | None, _option("size", "Pixels a side that images are made; 28.", min=1, max=512)] = None,
    colour: Annotated[Literal["grey", "rgb"] | None, _option("colour", "Which pixels are taken; grey.")] = None,
    model: Annotated[
        str | None, _option("model", "Features of this vision transformer in place of pixels (extra vision).")
    ] = None,
    partitioner: Annotated[
        str | None,
        _option("partitioner", "How undivided data are partitioned: iid, dirichlet:alpha=0.3, …", metavar="PART"),
    ] = None,
    clients: Annotated[int | None, _option("clients", "Among how many clients.", min=1)] = None,
    rounds: Annotated[int | None, _option("rounds", "Rounds of training.", min=1)] = None,
    batch_size: Annotated[int | None, _option("batch-size", "Samples in a local step.", min=1)] = None,
    lr: Annotated[float | None, _option("lr", "Local learning rate.")] = None,
    epochs: Annotated[
        list[str] | None, _option("epochs", "Local epochs of all, or of one client.", metavar="[CLIENT=]N")
    ] = None,
    hidden: Annotated[str | None, _option("hidden", "Widths of hidden layers: 32 or 64,32 or none.")] = None,
    participation_probability: Annotated[
        list[str] | None,
        _option("participation-probability", "How likely clients take part in a round.", metavar="[CLIENT=]P"),
    ] = None,
    seed: Annotated[int, _option("seed", "Draws the test rows, the partition and the training.", min=0)] = 0,
    overwrite: Annotated[bool, _option("overwrite", "Replace existing files.")] = False,
    yes: Annotated[bool, _option("yes", "Ask nothing; take the defaults.")] = False,
    output: opt.Format = "text",
) -> None:
    """Write an environment for your own data, and the data as one .npz where they are not.

    What is not given is requested on a terminal, with a default; elsewhere the default is taken.
    """
    from fedunfold.cli.import_source import WORDS, ImportSource
    from fedunfold.config import Client, Environment, ModelSpec
    from fedunfold.data.config import NpzSource

    given = {"label": label, "test": test, "drop": drop, "scaling": scaling, "size": size, "colour": colour}
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
        for client in sorted(single.keys() - set(found.clients)):
            raise InputError(f"{option}: there is no client {client}, only {', '.join(found.clients)}.")
    chosen = _training(
        answers,
        found,
        rounds=rounds,
        batch_size=batch_size,
        lr=lr,
        epochs=epochs_of_all,
        hidden=hidden and widths(hidden),
    )
    probability = 1.0 if probability_of_all is None else probability_of_all
    env = Environment(
        name=name,
        description=f"Made from {WORDS[own.kind]}.",
        rounds=chosen["rounds"],
        batch_size=chosen["batch_size"],
        lr=chosen["lr"],
        seed=seed,
        class_names=found.classes if found.imported is not None else None,
        model=ModelSpec(hidden=chosen["hidden"]),
        data=NpzSource(path=found.data),
        partition=found.partition,
        clients=tuple(
            Client(
                key=key,
                epochs=own_epochs.get(key, chosen["epochs"]),
                participation_probability=own_probability.get(key, probability),
            )
            for key in found.clients
        ),
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


def _training(answers: Answers, found: "ImportSummary", **given: Any) -> dict[str, Any]:
    """What was given or answered, or else what suits the data."""
    from fedunfold.config.template import suggest_training

    suggested = suggest_training(found.sizes, found.features)
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
    from fedunfold.cli import console

    commands = [shlex.join(["fedunfold", *words, str(out)]) for words in (("env", "check"), ("learn",))]
    if output == "json":
        console.print_json(
            {
                "files": [str(path) for path in files],
                "clients": dict(zip(found.clients, found.sizes, strict=True)),
                "test_samples": found.test_samples,
                "features": found.features,
                "classes": found.classes,
                "notes": list(found.notes),
                "next": commands,
            }
        )
        return
    for note in found.notes:
        console.say(note)
    console.say(
        f"wrote {', '.join(map(str, files))}: {len(found.clients)} clients, {sum(found.sizes)} training and "
        f"{found.test_samples} test samples, {found.features} features, {len(found.classes)} classes."
    )
    console.say("next:")
    for command in commands:
        console.say(f"  {command}")
