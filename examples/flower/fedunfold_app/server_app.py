"""The server: learns how much each client should count, then trains with that and with sizes, to compare."""

from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedunfold as fu
from fedunfold.experiments.methods import learned_method, method
from fedunfold.flower import federation
from fedunfold.rounds import run_rounds
from fedunfold.unfolding import learn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    env = fu.environment(str(config["environment"]))
    if config["rounds"]:
        env = env.with_(rounds=int(config["rounds"]))
    clients = federation(grid, env, timeout=float(config["timeout"]), private=bool(config["private"]))
    chosen = method(str(config["method"]))
    learning = replace(chosen.learning, adjoint=config["adjoint"], iterations=int(config["iterations"]))
    folder = Path(str(config["folder"])) if config["folder"] else None

    def progress(so_far: fu.LearnedWeights) -> None:
        print(f"outer step {len(so_far.losses)} of {learning.iterations}: loss {so_far.losses[-1]:.5g}", flush=True)

    learned = learn(
        clients,
        env.rounds,
        algorithm=chosen.algorithm,
        learning=learning,
        checkpoint=folder / "learning.safetensors" if folder else None,
        on_iteration=progress,
    )
    if folder:
        learned.save(folder / "weights.safetensors")
    for name, used in (("learned weights", learned_method(learned)), ("size weights", method("fedavg"))):
        state = folder / f"{name.replace(' ', '-')}.safetensors" if folder else None
        result = run_rounds(clients, used.rule, env.rounds, algorithm=used.algorithm, checkpoint=state)
        print(f"{name}: {100 * result.accuracies[-1]:.1f} % after {env.rounds} rounds", flush=True)
    for key, faults in clients.faults.as_dict().items():
        print(f"client {key}: {faults}", flush=True)
