"""Run as a program: learn and train on digits over Flower's Ray simulation, and in process; write both down."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedunfold.environments import environment
from fedunfold.federation import Federation
from fedunfold.flower import client_app, federation, site_of
from fedunfold.losses import OuterLoss
from fedunfold.rounds import Algorithm, run_rounds
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding import Learning, learn
from fedunfold.unfolding.adjoint import unfold
from fedunfold.weighting import size

ENV = environment("digits-label-skew").with_(rounds=3)


def everything(clients: Federation) -> dict[str, Any]:
    start = clients.initial_model("learn-0")
    theta = torch.full((3, 5), 0.5, dtype=torch.float64)
    found: dict[str, Any] = {}
    for adjoint in ("first_order", "exact"):
        step = unfold(clients, theta, Algorithm(), OuterLoss("balanced"), adjoint, run="learn-0", model=start)
        found[adjoint] = step.gradient.tolist()
    learned = learn(clients, 3, learning=Learning(iterations=2))
    found["weights"] = learned.weights.tolist()
    found["model"] = run_rounds(clients, learned, 3).model.tolist()
    return found


def in_sums(clients: Federation) -> dict[str, Any]:
    """What a private federation can give as well as an open one, in fewer rounds."""
    theta, start = torch.full((1, 5), 0.5, dtype=torch.float64), clients.initial_model("learn-0")
    step = unfold(clients, theta, Algorithm(), OuterLoss("balanced"), "exact", run="learn-0", model=start)
    return {"private gradient": step.gradient.tolist(), "private model": run_rounds(clients, size(), 1).model.tolist()}


def main(path: str, precision: str) -> None:
    dtype = getattr(torch, precision)
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        simulated = SimulatedFederation(ENV, dtype=dtype)
        over_flower = everything(federation(grid, ENV, dtype=dtype))
        over_flower |= in_sums(federation(grid, ENV, dtype=dtype, private=True))
        in_process = everything(simulated) | in_sums(simulated)
        Path(path).write_text(json.dumps({"flower": over_flower, "simulation": in_process}))

    clients = client_app(lambda context: site_of(ENV, context, dtype))
    run_simulation(server, clients, num_supernodes=5, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main(*sys.argv[1:])
