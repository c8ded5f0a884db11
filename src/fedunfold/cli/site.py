"""`fedunfold site`: one recipe for the tables of several sites, of which none shows a row."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedunfold.cli import Stopped, console
from fedunfold.cli import options as opt
from fedunfold.cli.commands import CommandGroup
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.data.importers.csv import CsvTable

Column = typer.Option(metavar="COLUMN")
Columns = Annotated[list[str] | None, Column]
File = typer.Option(metavar="FILE")
Name = Annotated[str | None, typer.Option(metavar="NAME")]

app = CommandGroup("Take part in a consortium: one recipe, applied at each site.")


@app.callback()
def _group() -> None:
    """Take part in a consortium: one recipe, applied at each site."""


@app.example("fedunfold site describe hospital-a.csv --label diagnosis --key hospital-a.pub --out hospital-a.json")
def describe(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv")],
    key: Annotated[Path, File],
    label: Annotated[str | None, Column] = None,
    out: Annotated[Path | None, File] = None,
    site: Name = None,
    task: Literal["classification", "regression"] | None = None,
    drop: Columns = None,
    categorical: Columns = None,
    id: Annotated[str | None, Column] = None,
    test: Annotated[float, typer.Option(metavar="FRACTION")] = 0.2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    min_patients: Annotated[int, typer.Option(min=1)] = 5,
    no_range: Annotated[bool, typer.Option("--no-range")] = False,
    overwrite: bool = False,
    output: opt.Format = "text",
) -> None:
    """At a hospital: what may leave of its table, shown in full and then written. No row is in it.

    Args:
        file: The table, a row for each patient.
        key: The public key of the site's SuperNode.
        label: The column to predict; by default label, y, target or class, else the last.
        out: The description, for the coordinator; without it, it is only shown.
        site: The site's name in the federation; by default the file's.
        task: What is predicted; by default what the column looks like.
        drop: A column to leave out.
        categorical: A column of categories, whatever its cells look like.
        id: The column that tells rows apart: no feature.
        test: Part of the rows of every class that the site holds out.
        seed: Draws these rows.
        min_patients: Of fewer rows, no category, sum or range leaves the site.
        no_range: Do not tell what numbers lie in.
        overwrite: Replace an existing file.
    """
    from fedunfold.consortium.describe import describe as describe_table
    from fedunfold.consortium.roster import RosterSite, load_public_key
    from fedunfold.data.importers.csv import guess_label

    _free(out, overwrite)
    table = _table(file)
    named = RosterSite(name=_name_of(file, site), public_key=load_public_key(key))
    label = guess_label(table.columns) if label is None else label
    found, findings = describe_table(
        table,
        named,
        label,
        task=task,
        drop=drop or (),
        categorical=categorical or (),
        id=id,
        test=test,
        seed=seed,
        min_patients=min_patients,
        ranges=not no_range,
    )
    for finding in findings:
        console.warn(finding.message)
    text, listing = found.text(), found.listing()
    if output == "json":
        console.print_json(
            {"bytes": len(text.encode()), "file": None if out is None else str(out), "content": found.document()}
        )
    else:
        console.say(f"what leaves {named.name}, {len(text.encode())} bytes in {len(listing)} fields:")
        for field, values in listing:
            console.say(f"  {field}: {values}")
    if out is not None:
        found.write(out)
        if output == "text":
            console.say(f"wrote {out}: send it to the coordinator. The table stays here.")


@app.example("fedunfold site agree hospital-a.json hospital-b.json --label diagnosis --out recipe.json")
def agree(
    descriptions: Annotated[list[Path], typer.Argument(metavar="DESCRIPTION.json …")],
    label: Annotated[str, Column],
    out: Annotated[Path, File],
    columns: Literal["all", "shared"] = "all",
    drop: Columns = None,
    positive: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    overwrite: bool = False,
    output: opt.Format = "text",
) -> None:
    """At the coordinator: one recipe of all descriptions, with a sentence for each difference between the sites.

    Beside it come the settings of a run over Flower, in a file that ends in .toml.

    Args:
        descriptions: What `site describe` wrote, one of each site.
        label: The column to predict.
        out: The recipe, for all sites.
        columns: all fills in what a site lacks; shared takes what every site has.
        drop: A column to leave out.
        positive: The one of two classes that is 1.
        keys: Where to write every site's public key, for `flwr supernode register`.
        overwrite: Replace existing files.
    """
    from fedunfold.consortium.agree import agree as agree_on
    from fedunfold.consortium.agree import run_settings
    from fedunfold.consortium.description import Description
    from fedunfold.io.atomic import write_atomically

    if out.suffix != ".json":
        raise InputError(f"--out {out}: a recipe's file ends in .json; name it so.")
    settings = out.with_suffix(".toml")
    _free(out, overwrite)
    _free(settings, overwrite)
    found = [Description.read(path) for path in descriptions]
    recipe, notes = agree_on(found, label, columns=columns, drop=drop or (), positive=positive)
    written = {settings: run_settings(recipe, out)}
    if keys is not None:
        written |= {keys / f"{own.name}.pub": f"{own.public_key} {own.name}\n" for own in recipe.roster.sites}
    for path, text in written.items():
        write_atomically(path, partial(Path.write_text, data=text, encoding="utf-8"))
    recipe.write(out)
    files = [out, *written]
    features = [feature.column for feature in recipe.features]
    if output == "json":
        console.print_json(
            {
                "files": list(map(str, files)),
                "checksum": recipe.checksum,
                "sites": recipe.roster.names,
                "task": recipe.task.describe(),
                "classes": recipe.classes,
                "columns": list(dict.fromkeys(features)),
                "features": len(features),
                "notes": notes,
            }
        )
        return
    console.note(notes)
    console.say(
        f"wrote {', '.join(map(str, files))}: {len(recipe.roster.sites)} sites, {len(set(features))} columns, "
        f"{len(features)} features, {opt.task_in_words(recipe.task)}. Send {out} to all sites."
    )


@app.example("fedunfold site apply recipe.json hospital-a.csv --out hospital-a.npz")
def apply(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.json")],
    file: Annotated[Path, typer.Argument(metavar="FILE.csv")],
    out: Annotated[Path, File],
    site: Name = None,
    overwrite: bool = False,
    output: opt.Format = "text",
) -> None:
    """At a hospital: features of its table by the recipe. They stay there.

    Args:
        recipe: What `site agree` wrote.
        file: The table that was described.
        out: The .npz; rows held out go beside it.
        site: The site's name in the recipe; by default the file's.
        overwrite: Replace existing files.
    """
    from fedunfold.consortium.apply import apply as apply_to
    from fedunfold.consortium.apply import held_out_file
    from fedunfold.consortium.recipe import SiteRecipe

    if out.suffix != ".npz":
        raise InputError(f"--out {out}: a site's arrays are in a file that ends in .npz; name it so.")
    _free(out, overwrite)
    _free(held_out_file(out), overwrite)
    found = apply_to(SiteRecipe.read(recipe), _table(file), _name_of(file, site))
    files = found.write(out)
    rows = {"training_rows": len(found.train[1]), "held_out_rows": len(found.held_out[1])}
    if output == "json":
        features = found.train[0].shape[1]
        console.print_json({"files": list(map(str, files)), **rows, "features": features, "notes": found.notes})
        return
    console.note(found.notes)
    console.say(
        f"wrote {', '.join(map(str, files))}: {rows['training_rows']} rows to train on and {rows['held_out_rows']} "
        f"held out, {found.train[0].shape[1]} features."
    )


@app.example(
    "fedunfold site start recipe.json hospital-a.npz --superlink link.example.org:9092 --root-certificates ca.crt "
    "--key hospital-a"
)
def start(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.json")],
    data: Annotated[Path, typer.Argument(metavar="SITE.npz")],
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")],
    root_certificates: Annotated[Path, File],
    key: Annotated[Path, File],
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    secure_aggregation: Annotated[bool, typer.Option("--secure-aggregation")] = False,
    node_config: Annotated[str, typer.Option(metavar="NAME=VALUE …")] = "",
) -> None:
    """At a hospital: run its SuperNode on its arrays until Ctrl-C, over TLS and under its key.

    Flower reports nothing to its makers, and installs nothing.

    Args:
        recipe: What `site agree` wrote.
        data: What `site apply` wrote.
        superlink: The coordinator's SuperLink.
        root_certificates: The authority that signed the SuperLink's certificate.
        key: The site's private key, which stays here.
        host: Where the SuperNode's own processes reach it, on this machine.
        port: The same; one that is free.
        secure_aggregation: Show no update of its own: take part in secure sums alone.
        node_config: Other settings of this node for the app.
    """
    from fedunfold.consortium.supernode import SuperNode

    node = SuperNode.of(
        recipe,
        data,
        superlink=superlink,
        root_certificates=root_certificates,
        private_key=key,
        host=host,
        port=port,
        secure_aggregation=secure_aggregation,
        node_config=node_config,
    )
    try:
        node.run(console.say, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        raise Stopped(f"the SuperNode of {node.site} was stopped.") from None


def _free(out: Path | None, overwrite: bool) -> None:
    """Refuse before any work what would be lost."""
    if out is not None and out.exists() and not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or replace it with --overwrite.")


def _table(file: Path) -> "CsvTable":
    from fedunfold.data.importers.csv import CsvTable

    if not file.is_file():
        raise InputError(f"{file} is no file; name the site's table.")
    return CsvTable(file)


def _name_of(file: Path, given: str | None) -> str:
    """The site's name: the one given, or the file's without what no name may have."""
    from fedunfold.data.importers.imported import client_key

    name = client_key(file.stem) if given is None else given
    if not name:
        raise InputError(f"the name of {file} makes no site's name; give one with --site.")
    return name
