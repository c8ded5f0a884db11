"""Server and clients; the tests' folder is in their PYTHONPATH."""

import json
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from tests.support.everything import ENV, everything

from fedunfold.engines.flower import LocalClient, client_app, client_from_environment, federation_from_environment


def precision(context: Context) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[str(context.run_config["precision"])]


def open_client(context: Context) -> LocalClient:
    return client_from_environment(ENV, context, precision(context))


client = client_app(open_client)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    found = everything(federation_from_environment(grid, ENV, dtype=precision(context), timeout=120.0))
    Path(str(context.run_config["file"])).write_text(json.dumps(found), encoding="utf-8")
