"""The server: learns how much each client should count, then trains with that and with sizes, and reports both."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedunfold as fu
from fedunfold.core.task import PrimaryMetric
from fedunfold.engines.flower import RemoteFederation, federation_from_config, federation_from_environment
from fedunfold.io.atomic import write_atomically
from fedunfold.runs.artifacts import Files, of_remote_run
from fedunfold.runs.schema import file_name
from fedunfold.runs.trained_model import ModelRecord
from fedunfold.training.loop import run_rounds
from fedunfold.training.methods import Method, changed, learned_method, method
from fedunfold.unfolding import learn
from fedunfold_app.settings import Config, bundled, federation_config, precision

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, began = context.run_config, time.monotonic()
    folder = Path(str(config["folder"])) if config["folder"] else None
    clients, tested_on = connect(grid, config)
    recipe = Path(str(config["recipe"])).expanduser() if config["recipe"] else None
    record = ModelRecord.of(clients.environment, recipe)  # a wrong recipe is better found before training
    runs: dict[str, Any] = {}
    for name, chosen in contenders(clients, config, folder).items():
        assert chosen.rule is not None
        state = folder / f"{name}-run.safetensors" if folder else None
        rounds = clients.environment.rounds

        def progress(t: int, _: object, name: str = name, rounds: int = rounds) -> None:
            print(f"{name}: round {t + 1} of {rounds}", flush=True)

        how: dict[str, Any] = {"algorithm": chosen.algorithm, "checkpoint": state, "on_round": progress}
        (result,) = run_rounds(clients, chosen.rule, rounds, **how)
        last, metric = result.evaluations[-1], PrimaryMetric.of(clients.task)
        runs[name] = {**last.metrics, "loss": last.loss, "participated": result.participated.int().tolist()}
        score = f"{metric.label} {metric.text(metric.factor() * last.score)}{metric.unit()}"
        print(f"{name}: {score} after {len(result.scores)} rounds", flush=True)
        if folder is not None:
            save_model(folder / file_name(name), of_remote_run(clients, chosen, result, record, tested_on))
    report = {
        "clients": [client.client_id for client in clients.clients],
        "rounds": clients.environment.rounds,
        "task": clients.task.describe(),
        "tested_on": tested_on,
        "runs": runs,
        "failures": clients.failures.as_dict(),
        "seconds": round(time.monotonic() - began, 1),
    }
    text = json.dumps(report)
    print(f"report: {text}", flush=True)
    if folder:
        write_atomically(folder / "report.json", lambda file: file.write_text(text, encoding="utf-8"))


def save_model(folder: Path, files: Files) -> None:
    """The trained model with its card, as a simulated run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in files.items():
        write(folder / name)
    print(f"the model is in {folder}", flush=True)


def connect(grid: Grid, config: Config) -> tuple[RemoteFederation, str]:
    """The clients, once all have registered, and what models are tested on."""
    how: dict[str, Any] = {
        "timeout": float(config["timeout"]),
        "registration_timeout": float(config["registration-timeout"]),
        "dtype": precision(config),
        "secure_aggregation": bool(config["secure-aggregation"]),
    }
    custom = federation_config(config)
    if custom is None:
        env = bundled(str(config["environment"]))
        env = env.replace(rounds=config["rounds"]) if config["rounds"] else env
        return federation_from_environment(grid, env, **how), f"the test set of {env.name}"
    test = str(config["test"]) or None
    clients = federation_from_config(grid, custom, test, **how)
    if test is not None:
        return clients, test
    held_out = [rows > 0 for rows in clients.num_held_out.values()]
    if all(held_out):
        return clients, "what the clients hold out"
    own = "the clients' own training data"
    return clients, f"what clients hold out, and of the others {own}" if any(held_out) else own


def contenders(clients: RemoteFederation, config: Config, folder: Path | None) -> dict[str, Method]:
    """What to train with: the chosen method, its weights learned where it needs that, and size weights."""
    absent = str(config["absent"]) or None
    chosen, plain = (changed(method(name), absent=absent) for name in (str(config["method"]), "fedavg"))
    sizes = {"size": plain}
    if chosen.name == plain.name:
        return sizes
    if chosen.rule is not None:
        return {chosen.name: chosen, **sizes}
    learning = replace(chosen.learning, adjoint=config["adjoint"], iterations=config["iterations"])
    if clients.sums_only:  # which no update may enter twice
        learning = replace(learning, initial_model="resample")

    def progress(so_far: fu.LearnedWeights) -> None:
        print(f"outer step {len(so_far.losses)} of {learning.iterations}: loss {so_far.losses[-1]:.5g}", flush=True)

    learned = learn(
        clients,
        clients.environment.rounds,
        algorithm=chosen.algorithm,
        learning=learning,
        checkpoint=folder / "learning.safetensors" if folder else None,
        checkpoint_seconds=0.0,
        on_iteration=progress,
    )
    if folder:
        learned.save(folder / "weights.safetensors")
    return {"learned": learned_method(learned, chosen.name), **sizes}
