"""Run as a program: learn and train on digits over Flower's Ray simulation, and in process, in both precisions; write
all of it down. One simulation, since starting it takes longer than all that is computed in it."""

import json
import sys
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedunfold.engines.flower import client_app, client_from_environment, federation_from_environment
from fedunfold.engines.simulation import SimulatedFederation
from tests.support.everything import ENV, TOLERANCE, everything, in_sums


def main(path: str) -> None:
    server, now = ServerApp(), Path(path).with_suffix(".precision")  # which the clients read

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        found = {}
        for precision in TOLERANCE:
            now.write_text(precision)
            dtype = getattr(torch, precision)
            simulated = SimulatedFederation(ENV, dtype=dtype)
            over_flower = everything(federation_from_environment(grid, ENV, dtype=dtype))
            secure = federation_from_environment(grid, ENV, dtype=dtype, secure_aggregation=True)
            over_flower |= in_sums(secure, precision)
            found[precision] = {
                "flower": over_flower,
                "simulation": everything(simulated) | in_sums(simulated, precision),
            }
        Path(path).write_text(json.dumps(found))

    clients = client_app(lambda context: client_from_environment(ENV, context, getattr(torch, now.read_text())))
    run_simulation(server, clients, num_supernodes=5, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main(*sys.argv[1:])
