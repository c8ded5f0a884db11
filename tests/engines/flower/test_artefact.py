"""What the example app leaves: a model with its card, which predicts in another process as it did when trained."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedunfold as fu
from fedunfold.core.errors import FederationError, InputError
from fedunfold.data.importers.csv import CsvTable
from fedunfold.data.importers.imported import write_npz, write_recipe
from fedunfold.data.importers.tabular import encode
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules import size
from fedunfold.runs.trained_model import TrainedModel
from fedunfold.training.loop import run_rounds
from tests.engines.flower.test_app import run

SITES = ("north", "south")
SETTINGS: dict[str, Any] = {"clients": " ".join(SITES), "task": "binary", "method": "fedavg", "precision": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sites' tables, made into arrays by one recipe; a part of each site's rows is held out."""
    stream = np.random.default_rng(0)
    tables = {}
    for name, n in zip(SITES, (60, 40), strict=True):
        lines = ["age,sex,outcome"]
        for _ in range(n):
            age, sex = stream.integers(20, 80), stream.choice(["f", "m"])
            ill = (age - 50) / 10 + (1.5 if sex == "m" else -1.5) + stream.normal(0, 2) > 0
            lines.append(f"{age},{sex},{'ill' if ill else 'well'}")
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        tables[name] = CsvTable(tmp_path / f"{name}.csv")
    imported = encode(tables, 0.2, "outcome", task=fu.binary())
    write_npz(tmp_path / "sites.npz", imported)
    write_recipe(tmp_path / "sites.columns.json", imported)
    for name, (x, y) in imported.clients.items():
        np.savez(tmp_path / f"{name}.npz", x=x[10:], y=y[10:])
        np.savez(tmp_path / f"{name}-held.npz", x=x[:10], y=y[:10])
    np.savez(tmp_path / "test.npz", x=imported.test[0], y=imported.test[1])
    (tmp_path / "new.csv").write_text("sex,age\nm,75\nf,25\nm,\nf,51\n")
    return tmp_path


def nodes(folder: Path, held_out: bool = True) -> dict[int, dict[str, Any]]:
    own = {name: {"client-id": name, "path": str(folder / f"{name}.npz")} for name in SITES}
    return {
        k: found | ({"held-out": str(folder / f"{name}-held.npz")} if held_out else {})
        for k, (name, found) in enumerate(own.items())
    }


def trained(folder: Path, **settings: Any) -> tuple[torch.nn.Module, SimulatedFederation]:
    """The same training in a simulation."""
    rows = {name: np.load(folder / f"{name}.npz") for name in (*SITES, "test")}
    arrays = {name: (found["x"], found["y"]) for name, found in rows.items()}
    env = fu.Environment.from_arrays(
        {name: arrays[name] for name in SITES},
        arrays["test"],
        task=fu.binary(),
        rounds=3,
        batch_size=10,
        lr=0.05,
        epochs=2,
        model=(32,),
    )
    federation = SimulatedFederation(env)
    (result,) = run_rounds(federation, size(), 3)
    return federation.module(result.model), federation


def fedunfold(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "fedunfold", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_its_model_predicts_in_a_new_process_as_it_was_trained(folder: Path) -> None:
    recipe = folder / "sites.columns.json"
    run(folder, None, nodes(folder), **SETTINGS, test=str(folder / "test.npz"), recipe=str(recipe))
    model = folder / "size"
    module, _ = trained(folder)
    with safe_open(model / "model.safetensors", "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            "1.weight": (32, 3),
            "1.bias": (32,),
            "3.weight": (2, 32),
            "3.bias": (2,),
        }
    done = fedunfold("predict", model, folder / "new.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    features = {entry["column"]: entry for entry in json.loads(recipe.read_text())["features"] if "mean" in entry}
    age = features["age"]
    x = torch.tensor(
        [
            [(a - age["mean"]) / age["scale"], s == "f", s == "m"]
            for a, s in ((75, "m"), (25, "f"), (age["missing"], "m"), (51, "f"))
        ]
    )
    with torch.no_grad():
        expected = module(x.float()).softmax(1)
    found = torch.tensor([[float(row["probability of ill"]), float(row["probability of well"])] for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert [row["prediction"] for row in rows] == [("ill", "well")[c] for c in expected.argmax(1).tolist()]

    (folder / "short.csv").write_text("age\n70\n")
    refused = fedunfold("predict", model, folder / "short.csv", "--out", folder / "refused.csv")
    assert refused.returncode == 2
    message = " ".join(refused.stderr.split())
    assert message.endswith("short.csv has no column sex, which the model was trained on; add it.")
    assert "Traceback" not in message and message.count(". ") == 0
    assert not (folder / "refused.csv").exists()

    exported = fedunfold("export", model, "--to", "torch-export", "--out", folder / "model.pt2")
    assert exported.returncode == 0, exported.stderr
    again = torch.export.load(folder / "model.pt2").module()(x.float()).softmax(1)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)


def test_its_card_has_the_figures_of_every_site(folder: Path) -> None:
    test = str(folder / "test.npz")
    run(folder, None, nodes(folder), **SETTINGS, test=test, recipe=str(folder / "sites.columns.json"))
    module, federation = trained(folder)
    card = (folder / "size" / "card.md").read_text(encoding="utf-8")
    for name in SITES:
        found = np.load(folder / f"{name}-held.npz")
        with torch.no_grad():
            right = module(torch.from_numpy(found["x"])).argmax(1).numpy() == found["y"]
        k = federation.data.keys.index(name)
        counts = " | ".join(map(str, federation.data.label_counts[k].tolist()))
        assert f"| {name} | {federation.data.sizes[k]} | 10 | {counts} |" in card
        assert f"| {name} | 10 | {100 * right.mean():.1f} |" in card
    rows = len(np.load(test)["y"])
    assert f"Tested on {test}, {rows} rows, after the last round." in card
    assert "| rule | size |" in card and "| method | fedavg |" in card
    assert "2 columns become 3 features: age, sex." in card
    assert "Fewer than 100 rows were held out at north, south" in card


def test_learned_weights_are_named_with_their_checksum(folder: Path) -> None:
    settings = SETTINGS | {"method": "duw-fedavg"}
    run(folder, None, nodes(folder, held_out=False), **settings, test=str(folder / "test.npz"))
    learned = fu.LearnedWeights.load(folder / "weights.safetensors")
    from fedunfold.core.params import fingerprint

    card = (folder / "learned" / "card.md").read_text(encoding="utf-8")
    assert f"| SHA-256 of the rule's numbers | {fingerprint(learned.weights)} |" in card
    assert "| method | duw-fedavg |" in card
    assert "no client held out rows" in card
    assert TrainedModel.load(folder / "learned").record.columns is None


def test_clients_that_hold_out_rows_test_the_model_on_them(folder: Path) -> None:
    report = run(folder, None, nodes(folder), **SETTINGS)
    module, _ = trained(folder)
    held = [np.load(folder / f"{name}-held.npz") for name in SITES]
    x, y = (torch.from_numpy(np.concatenate([found[axis] for found in held])) for axis in "xy")
    with torch.no_grad():
        outputs = module(x)
    assert report["tested_on"] == "what the clients hold out"
    assert "Tested on what the clients hold out, 20 rows, after" in (folder / "size" / "card.md").read_text()
    assert report["runs"]["size"]["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    loss = float(torch.nn.functional.cross_entropy(outputs, y))
    assert report["runs"]["size"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_under_secure_sums_no_site_has_a_figure_of_its_own(folder: Path) -> None:
    run(folder, None, nodes(folder), **SETTINGS, **{"secure-aggregation": True})
    card = (folder / "size" / "card.md").read_text(encoding="utf-8")
    assert "2 of 2 clients have no held-out figure" in card
    assert "no client held out rows that the model was tested on" in card


def test_a_recipe_that_does_not_fit_is_refused_before_training(folder: Path) -> None:
    recipe = json.loads((folder / "sites.columns.json").read_text())
    for change, message in (
        ({"features": recipe["features"][:2]}, r"makes 2 features, but the model reads rows of shape \[3\]"),
        ({"classes": ["ill", "well", "dead"]}, "names the classes ill, well, dead, but the task has 2"),
        ({"features": [{"column": "age"}]}, "is no recipe; name the .columns.json"),
    ):
        (folder / "other.json").write_text(json.dumps(recipe | change))
        with pytest.raises(InputError, match=message):
            run(folder, None, nodes(folder), **SETTINGS, recipe=str(folder / "other.json"))
        assert not (folder / "size").exists()


def test_held_out_rows_of_another_shape_are_refused(folder: Path) -> None:
    np.savez(folder / "south-held.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, int))
    with pytest.raises(FederationError, match=r"what client south holds out has rows of shape \[5\].*trains on \[3\]"):
        run(folder, None, nodes(folder), **SETTINGS)
