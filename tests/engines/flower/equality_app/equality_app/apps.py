"""Server and clients; the tests' folder is in their PYTHONPATH."""

import json
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from tests.support.everything import ENV, everything

from fedunfold.engines.flower import LocalClient, client_app, federation, site_of


def precision(context: Context) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[str(context.run_config["precision"])]


def open_site(context: Context) -> LocalClient:
    return site_of(ENV, context, precision(context))


client = client_app(open_site)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    found = everything(federation(grid, ENV, dtype=precision(context), timeout=120.0))
    Path(str(context.run_config["file"])).write_text(json.dumps(found), encoding="utf-8")
