"""The example app on arrays that sites made by a consortium's recipe, and on those of another recipe."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedunfold.consortium.agree import agree, run_settings
from fedunfold.consortium.apply import apply
from fedunfold.core.errors import FederationError
from fedunfold.data.importers.csv import CsvTable
from tests.consortium.test_agreement import described
from tests.data.importers.tables import SITES, Hospitals
from tests.engines.flower.test_app import DEFAULTS, run


def applied(folder: Path, tables: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The nodes of all sites, and the settings of a run, of those that the app knows."""
    recipe = agree(described(tables), "diagnosis")[0]
    nodes = {}
    for k, site in enumerate(SITES):
        path = folder / f"{site}.npz"
        apply(recipe, CsvTable(tables / f"{site}.csv"), site).write(path)
        nodes[k] = {"client-id": site, "path": str(path), "recipe-checksum": recipe.checksum}
    recipe.write(folder / "recipe.json")
    settings = tomllib.loads(run_settings(recipe, folder / "recipe.json"))
    return nodes, {name: value for name, value in settings.items() if name in DEFAULTS}


def test_a_run_needs_its_own_recipe(tmp_path: Path) -> None:
    tables = Hospitals().write(tmp_path / "sites")
    nodes, settings = applied(tmp_path, tables)
    report = run(tmp_path, nodes=nodes, method="fedavg", **settings)
    assert report["clients"] == list(SITES)
    assert report["task"] == {"name": "binary", "classes": 2}
    for other in ("", "0" * 64):
        wrong = nodes | {1: nodes[1] | {"recipe-checksum": other}}
        with pytest.raises(FederationError, match="budapest: its data were not made by the recipe of this run"):
            run(tmp_path, nodes=wrong, method="fedavg", **settings)
    anything = settings | {"recipe-checksum": ""}
    assert run(tmp_path, nodes=wrong, method="fedavg", **anything)["clients"] == list(SITES)
