"""The settings in [tool.flwr.app.config] and --run-config, the same on the server and on every client."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import fedunfold as fu
from fedunfold.config import Environment, ModelSpec
from fedunfold.core.errors import InputError
from fedunfold.core.task import TASKS
from fedunfold.engines.flower import FederationConfig

Config = Mapping[str, Any]


def federation_config(config: Config) -> FederationConfig | None:
    """The federation of clients with custom data, where the config names any."""
    client_ids = tuple(str(config["clients"]).split())
    if not client_ids:
        return None
    return FederationConfig(
        client_ids=client_ids,
        task=TASKS.parse(str(config["task"])),
        rounds=config["rounds"] or 10,
        batch_size=config["batch-size"],
        lr=config["lr"],
        epochs=config["epochs"],
        model=ModelSpec(hidden=_widths(str(config["hidden"]))),
        seed=config["seed"],
    )


def check_recipe(config: Config, node: Config) -> None:
    """Refuse a client whose data were made by another recipe than the run's, where the run has one."""
    agreed = str(config["recipe-checksum"])
    if agreed and node.get("recipe-checksum") != agreed:
        raise InputError(
            f"client {node.get('client-id')}: its data were not made by the recipe of this run; apply that recipe to "
            "its table, and start it with `fedunfold site start`."
        )


@lru_cache
def bundled(name: str) -> Environment:
    """An environment of this app's folder, of fedunfold's own, or of a .toml file; loaded once in a process."""
    here = Path(__file__).parent / f"{name}.toml"
    return fu.environment(here if here.exists() else name)


def precision(config: Config) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64}
    if config["precision"] not in known:
        raise InputError(f"precision is float32 or float64, not '{config['precision']}'.")
    return known[str(config["precision"])]


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split())
    except ValueError as error:
        raise InputError(f"hidden is a list of widths such as '32 16', not '{text}'.") from error
