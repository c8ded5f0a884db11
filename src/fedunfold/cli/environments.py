"""`fedunfold env`: what federations there are, and what is in them."""

from typing import Any

import typer

from fedunfold.cli import options as opt
from fedunfold.cli.new_environment import new

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="List, show, check and make environments.")
app.command(epilog="Example: fedunfold env new sites/ --label outcome --out mine.toml")(new)


@app.command("list", epilog="Example: fedunfold env list")
def list_(format: opt.Format = "text") -> None:
    """The environments that come with fedunfold."""
    from rich.table import Table

    from fedunfold.cli import console
    from fedunfold.environments import bundled, environment

    found = [environment(name) for name in bundled()]
    if format == "json":
        console.print_json([{"name": env.name, "description": env.description} for env in found])
        return
    table = Table()
    table.add_column("environment", no_wrap=True)
    table.add_column("what it is")
    for env in found:
        table.add_row(env.name, env.description)
    console.out.print(table)


@app.command(epilog="Example: fedunfold env show digits-flaky > mine.toml")
def show(env: opt.Env, format: opt.Format = "text") -> None:
    """The environment as TOML: a start for one of your own."""
    from fedunfold.cli import console
    from fedunfold.environments import environment

    found = environment(env)
    if format == "json":
        console.print_json(found.model_dump(mode="json"))
    else:
        typer.echo(found.to_toml(), nl=False)


@app.command(epilog="Example: fedunfold env check mine.toml")
def check(env: opt.Env, format: opt.Format = "text") -> None:
    """Load an environment's data and show who holds what; an error says what to mend."""
    from fedunfold.cli import console
    from fedunfold.environments import environment

    found = environment(env)
    data = found.load()
    total = sum(data.sizes)
    clients: list[dict[str, Any]] = [
        {
            "key": client.key,
            "samples": size,
            "label_counts": counts.tolist(),
            "epochs": client.epochs,
            "reliability": client.reliability,
        }
        for client, size, counts in zip(found.clients, data.sizes, data.label_counts, strict=True)
    ]
    if format == "json":
        console.print_json({"environment": found.name, "test_samples": len(data.y_test), "clients": clients})
        return
    console.out.print(
        console.clients_table(
            (
                client["key"],
                str(client["samples"]),
                f"{100 * client['samples'] / total:.1f} %",
                _labels(client["label_counts"]),
                str(client["epochs"]),
                f"{client['reliability']:g}",
            )
            for client in clients
        )
    )
    console.say(
        f"{found.name}: {len(clients)} clients, {total} training and {len(data.y_test)} test samples, "
        f"{data.classes} classes, {found.rounds} rounds; ready."
    )


def _labels(counts: list[int]) -> str:
    """The classes a client holds, as a short list."""
    held = [str(label) for label, count in enumerate(counts) if count]
    if len(held) == len(counts):
        return "all"
    return ", ".join(held[:10]) + (f", … ({len(held)})" if len(held) > 10 else "")
