"""`fedunfold env`: what federations there are, and what is in them."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from fedunfold.cli import console
from fedunfold.cli import options as opt
from fedunfold.cli.commands import CommandGroup
from fedunfold.cli.env_new import new

if TYPE_CHECKING:
    from fedunfold.config import Environment

app = CommandGroup("List, show, check and make environments.")
app.example("fedunfold env new sites/ --label outcome --out mine.toml")(new)


@app.example("fedunfold env list")
def list_(output: opt.Format = "text") -> None:
    """The environments that come with fedunfold."""
    from fedunfold.config import bundled, environment

    found = [environment(name) for name in bundled()]
    if output == "json":
        console.print_json([{"name": env.name, "description": env.description} for env in found])
        return
    rows = ((env.name, env.description) for env in found)
    console.out.print(console.table("", ("environment", "what it is"), rows, words=(0, 1)))


@app.example("fedunfold env show digits-flaky > mine.toml")
def show(env: opt.Env, output: opt.Format = "text") -> None:
    """The environment as TOML: a start for one of your own."""
    from fedunfold.config import environment

    found = environment(env)
    if output == "json":
        console.print_json(found.model_dump(mode="json"))
    else:
        typer.echo(found.to_toml(), nl=False)


@app.example("fedunfold env check mine.toml")
def check(env: opt.Env, output: opt.Format = "text") -> None:
    """Load an environment's data, show who holds what and how unlike clients are; an error says what to fix."""
    from dataclasses import asdict

    from fedunfold.config import environment
    from fedunfold.config.heterogeneity import Heterogeneity
    from fedunfold.config.recommendation import recommend

    found = environment(env)
    data = found.load()
    heterogeneity = Heterogeneity.of(found, data)
    expected = recommend(heterogeneity)
    total = sum(data.sizes)
    server_rows = 0 if data.server is None else len(data.server[1])
    clients: list[dict[str, Any]] = [
        {
            "key": client.key,
            "samples": size,
            "label_counts": counts.tolist() if data.classes > 1 else None,
            "targets": heterogeneity.targets.get(client.key),
            "divergence": heterogeneity.divergence[client.key],
            "epochs": client.epochs,
            "participation_probability": client.participation_probability,
        }
        for client, size, counts in zip(found.clients, data.sizes, data.label_counts, strict=True)
    ]
    if output == "json":
        console.print_json(
            {
                "environment": found.name,
                "test_samples": len(data.y_test),
                "server_samples": server_rows,
                "task": data.task.name,
                "classes": [found.class_name(c) for c in range(data.classes if data.classes > 1 else 0)],
                "clients": clients,
                "heterogeneity": asdict(heterogeneity),
                "outlook": asdict(expected),
            }
        )
        return
    rows = (
        (
            client["key"],
            str(client["samples"]),
            f"{100 * client['samples'] / total:.1f} %",
            *_held(found, client),
            f"{client['divergence']:.2f}",
            _epochs(client["epochs"]),
            f"{client['participation_probability']:g}",
        )
        for client in clients
    )
    held = ("labels",) if data.classes > 1 else tuple(name.replace("_", " ") for name in clients[0]["targets"] or ())
    heads = ("client", "samples", "share", *held, "divergence", "epochs", "takes part")
    console.out.print(console.table("clients", heads, rows, words=(0, 3) if data.classes > 1 else (0,)))
    console.say(
        f"{found.name}: {len(clients)} clients, {total} training and {len(data.y_test)} test samples, "
        f"{opt.task_in_words(data.task)}, {found.rounds} rounds; ready."
    )
    if server_rows:
        console.say(
            f"The server holds {server_rows} samples itself, which no client trains on and nothing is tested on."
        )
    if heterogeneity.between is not None:
        console.say(f"{100 * heterogeneity.between:.0f} % of the target's variance lies between clients.")
    console.say(
        f"The largest client has {heterogeneity.size_ratio:.3g} times the samples of the smallest; in a round "
        f"{heterogeneity.expected_present:.3g} clients are expected, with probability {heterogeneity.nobody:.2g} none."
    )
    console.say(f"Are learned weights likely to help? {_ANSWERS[expected.learned_weights]}")
    for line in (*expected.reasons, *expected.warnings):
        console.say(f"  - {line}")
    console.say(f"`fedunfold compare {shlex.quote(env)}` tells how much.")


FEW_CLASSES = 3

_ANSWERS = {
    "likely": "Likely: where clients were like this they gained over FedAvg, unless the task was easy for it.",
    "perhaps": "Perhaps: where clients were like this the gain was small, or only sometimes there.",
    "unlikely": "Not likely: begin with FedAvg, which costs nothing to learn.",
}


def _held(env: "Environment", client: Mapping[str, Any]) -> tuple[str, ...]:
    """What a client's labels or targets are, a text for each column."""
    if client["label_counts"] is not None:
        return (_labels(env, client["label_counts"]),)
    return tuple(f"{value:.4g}" for value in (client["targets"] or {}).values())


def _labels(env: "Environment", counts: list[int]) -> str:
    """The classes a client holds, as a short list; of few, how many samples of each."""
    if len(counts) <= FEW_CLASSES:
        return ", ".join(f"{count} {env.class_name(label)}" for label, count in enumerate(counts) if count)
    held = [env.class_name(label) for label, count in enumerate(counts) if count]
    if len(held) == len(counts):
        return "all"
    return ", ".join(held[:10]) + (f", … ({len(held)})" if len(held) > 10 else "")


def _epochs(epochs: int | tuple[int, ...]) -> str:
    """One number, or the range over the rounds."""
    if isinstance(epochs, int):
        return str(epochs)
    return f"{min(epochs)}–{max(epochs)}"
