"""docs/consortium.md as five hospitals and a coordinator follow it, each in a folder of its own, over TLS with keys.

The lines of the page are run as they stand, with these changes: machines are addresses of the loopback, rounds are few,
and the SuperLink has a free port.
"""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors import safe_open
from safetensors.torch import save_file

from fedunfold.cli import main
from fedunfold.config import ModelSpec
from fedunfold.config.model import model_factory
from fedunfold.consortium.recipe import SiteRecipe
from fedunfold.consortium.roster import load_roster
from fedunfold.core.params import load_model
from fedunfold.runs.trained_model import ModelRecord
from tests.consortium import hospitals
from tests.consortium.hospitals import LABEL, RARE, SITES
from tests.support import warm_start

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "flower"))
from simulate import APP, QUIET, free_port, stopped, wait_for  # noqa: E402  (the app's folder is no package)

pytestmark = [pytest.mark.network, pytest.mark.slow]
PAGE = (ROOT / "docs" / "consortium.md").read_text(encoding="utf-8")
LINES = re.findall(r"^    ((?:fedunfold|openssl|ssh-keygen|flwr|flower-superlink|for) .*)$", PAGE, re.MULTILINE)
CONNECTION, TRAINING = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROUNDS = 3
AT_HOSPITAL = "hospital-a"


class Afternoon:
    """The coordinator's folder and the hospitals', and what runs in them."""

    def __init__(self, root: Path, processes: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.processes, self.capsys, self.port = root, processes, capsys, free_port()
        self.coordinator, self.home = root / "coordinator", root / "coordinator" / "flwr"
        self.home.mkdir(parents=True)
        (self.coordinator / "descriptions").mkdir()
        binaries = Path(sys.executable).parent
        socket = warm_start.install(root / "warm")  # so that clients need not load torch for every message
        self.environment = os.environ | QUIET
        self.environment |= {
            "FLWR_HOME": str(self.home),
            "PATH": os.pathsep.join([str(socket.parent), str(binaries), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }
        self.begin("warm", root, [sys.executable, "-m", "tests.support.warm_start", str(socket)])

    def site(self, name: str) -> Path:
        return self.root / name

    def on_loopback(self, text: str) -> str:
        text = text.replace("DNS:link.example.org", "IP:127.0.0.1").replace("link.example.org", "127.0.0.1")
        return text.replace("9092", str(self.port)).replace("0.0.0.0", "127.0.0.1")

    def begin(self, name: str, folder: Path, command: list[str]) -> "subprocess.Popen[bytes]":
        """A program that runs beside the others."""
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.enter_context(stopped(process))
        return process

    def enter(self, folder: Path, line: str) -> str:
        """One line of the page in a folder; gives what it printed."""
        line = self.on_loopback(line)
        if line.startswith("flower-superlink"):
            wait_for(self.port, self.begin("superlink", folder, shlex.split(line)))
            return ""
        if line.startswith("fedunfold site start"):
            address = f"127.0.0.{2 + SITES.index(folder.name)}"
            self.begin(folder.name, folder, [*shlex.split(line), "--host", address])
            return ""
        if not line.startswith("fedunfold"):
            done = subprocess.run(
                ["bash", "-c", line], cwd=folder, env=self.environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            return done.stdout
        words = [
            found for word in shlex.split(line)[1:] for found in (sorted(folder.glob(word)) if "*" in word else [word])
        ]
        self.capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.chdir(folder)
            main(list(map(str, words)))
        printed = self.capsys.readouterr()
        assert stop.value.code in (0, None), f"{line}: {printed.err}"
        return printed.out

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()


@pytest.fixture
def afternoon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Afternoon]:
    with ExitStack() as processes:
        yield Afternoon(tmp_path, processes, capsys)


def beginning(words: str) -> list[str]:
    """The page's lines that begin so."""
    found = [line for line in LINES if line.startswith(words)]
    assert found, words
    return found


def at_hospitals(afternoon: Afternoon, words: str) -> dict[str, str]:
    """One of the page's lines, typed at every hospital under its own name; gives what each printed."""
    (line,) = beginning(words)
    return {site: afternoon.enter(afternoon.site(site), line.replace(AT_HOSPITAL, site)) for site in SITES}


def test_five_spreadsheets_become_a_model_at_a_coordinator_who_sees_no_row(afternoon: Afternoon) -> None:
    tables, new = hospitals.tables()
    for site, rows in tables.items():
        afternoon.site(site).mkdir()
        hospitals.write(afternoon.site(site) / f"{site}.csv", rows, hospitals.SEPARATORS[site])
    for line in beginning("openssl"):
        afternoon.enter(afternoon.coordinator, line)
    at_hospitals(afternoon, "ssh-keygen")
    printed = at_hospitals(afternoon, "fedunfold site describe")
    for site, rows in tables.items():
        description = afternoon.site(site) / f"{site}.json"
        check_what_leaves(description, printed[site], rows)
        shutil.copy(description, afternoon.coordinator / "descriptions")
        shutil.copy(afternoon.coordinator / "ca.crt", afternoon.site(site))
    agreed = afternoon.enter(afternoon.coordinator, *beginning("fedunfold site agree"))
    assert "column mean area: hospital-c has no cell of it" in agreed
    assert "column side: hospital-d has no cell of it" in agreed
    assert "hospital-e has rarer texts too" in agreed
    assert "columns are matched by name" in agreed
    for site in SITES:
        shutil.copy(afternoon.coordinator / "recipe.json", afternoon.site(site))
    applied = at_hospitals(afternoon, "fedunfold site apply")
    assert "2 cells have a text that the recipe does not list" in applied["hospital-e"]
    afternoon.enter(afternoon.coordinator, *beginning("flower-superlink"))
    (afternoon.home / "config.toml").write_text(
        afternoon.on_loopback(CONNECTION).replace("ca.crt", str(afternoon.coordinator / "ca.crt"))
    )
    afternoon.enter(afternoon.coordinator, *beginning("for"))
    at_hospitals(afternoon, "fedunfold site start")
    complete_settings(afternoon.coordinator / "recipe.toml")
    wait_until_connected(afternoon)
    (run,) = beginning("flwr run")
    said = afternoon.enter(afternoon.coordinator, run.replace("examples/flower", str(APP)))
    report = json.loads((afternoon.coordinator / "runs" / "consortium" / "report.json").read_text())
    assert report["clients"] == list(SITES), said
    assert np.array(report["runs"]["size"]["participated"]).all()
    assert report["runs"]["size"]["balanced_accuracy"] > 0.85
    no_row_in(afternoon, tables)
    predicted_by_name(afternoon, new)


def check_what_leaves(description: Path, printed: str, rows: hospitals.Table) -> None:
    """The bytes and fields that leave are those that were shown, and no value of a row is among them."""
    content = json.loads(description.read_text(encoding="utf-8"))
    site = description.stem
    fields = len(content) - 1 + len(content["columns"])
    assert f"what leaves {site}, {description.stat().st_size} bytes in {fields} fields:" in printed
    leaves = list(leaves_of(content))
    for name, value in leaves:
        assert f"{value}" in printed, name
    assert {name for name, _ in leaves} == {
        *("kind", "version", "checksum", "name", "public_key", "rows", "training_rows", "test_fraction", "seed"),
        *("min_patients", "id", "classes", "missing", "count", "sum", "squares", "range"),
        *(["categories"] if hospitals.SIDE in rows[0] else []),
        *(["others"] if site == "hospital-e" else []),
    }
    allowed = {"categories": {"left", "right"}, "classes": {"benign", "malignant"}, "name": {*rows[0], site}}
    for name, values in allowed.items():
        assert {value for key, value in leaves if key == name} <= values
    told = {str(value) for name, value in leaves if name not in (*allowed, "range")}
    cells = {cell for row in rows for name, cell in row.items() if name not in (LABEL, hospitals.SIDE)}
    measured = {cell for cell in cells if len(cell) > 3}  # 0.0 is a part of missing cells too
    assert len(measured) > 500
    assert not told & measured
    for name, value in leaves:
        assert name != "range" or float(f"{value:.2g}") == value
    text = description.read_text(encoding="utf-8")
    assert RARE not in text
    assert not any(row[hospitals.ID] in text for row in rows)


def leaves_of(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value of a JSON document, with the name it has."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves_of(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from leaves_of(value, name)
    else:
        yield name, content


def complete_settings(file: Path) -> None:
    """What the page says is added, with few rounds; of the settings, those that the app knows."""
    known = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings = tomllib.loads(file.read_text() + TRAINING) | {"rounds": ROUNDS}
    assert settings["clients"] == " ".join(SITES)
    file.write_text(tomli_w.dumps({name: value for name, value in settings.items() if name in known}))


def wait_until_connected(afternoon: Afternoon) -> None:
    deadline = time.monotonic() + 300
    while missing := [site for site in SITES if "is connected to" not in afternoon.log(site)]:
        assert time.monotonic() < deadline, afternoon.log(missing[0])
        time.sleep(0.1)


def no_row_in(afternoon: Afternoon, tables: dict[str, hospitals.Table]) -> None:
    """No file of the coordinator, its SuperLink's log among them, has a patient's id or the features of a row."""
    files = [path for path in afternoon.coordinator.rglob("*") if path.is_file()]
    held = b"".join(path.read_bytes() for path in [*files, afternoon.root / "superlink.log"])
    assert len(files) > 10
    for site, rows in tables.items():
        assert not any(row[hospitals.ID].encode() in held for row in rows)
        for x in np.load(afternoon.site(site) / f"{site}.npz")["x"]:
            assert x.tobytes() not in held


def predicted_by_name(afternoon: Afternoon, new: hospitals.Table) -> None:
    """The model finds in the recipe how to read new patients, and what the classes are called."""
    model = afternoon.coordinator / "runs" / "consortium" / "size"
    if not model.exists():
        save_model(afternoon.coordinator, model)
    hospitals.write(afternoon.coordinator / "new-patients.csv", new, ";")
    for line in (*beginning("fedunfold predict"), *beginning("fedunfold export")):
        afternoon.enter(afternoon.coordinator, line)
    rows = list(csv.DictReader((afternoon.coordinator / "predictions.csv").read_text().splitlines()))
    assert [row["patient"] for row in rows] == [row["patient"] for row in new]
    assert np.mean([row["prediction"] == own[LABEL] for row, own in zip(rows, new, strict=True)]) > 0.8
    assert (afternoon.coordinator / "model.safetensors").stat().st_size > 0


def save_model(coordinator: Path, folder: Path) -> None:
    """The checkpoint's model with the recipe, in the files of a run."""
    recipe = SiteRecipe.read(coordinator / "recipe.json")
    assert load_roster(coordinator / "recipe.json").names == SITES
    record = ModelRecord(
        model=ModelSpec(hidden=(16,)),
        features=(len(recipe.features),),
        task=recipe.task,
        class_names=recipe.classes,
        columns=recipe.columns(),
    )
    module = model_factory(record.model, record.features, recipe.task.num_outputs)()
    with safe_open(coordinator / "runs" / "consortium" / "size-run.safetensors", framework="pt") as opened:
        load_model(module, opened.get_tensor("0.model"))
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "model.json").write_text(record.model_dump_json())
