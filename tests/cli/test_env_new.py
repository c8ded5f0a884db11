"""`fedunfold env new`, and `env check` and `learn` on what it wrote, as they are typed."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedunfold as fu
from fedunfold.cli import prompts
from fedunfold.config import Environment
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused
from tests.support import sites


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    return sites.hospitals(tmp_path / "sites")


def test_from_csv_files_to_learned_weights(fedunfold: Command, hospitals: Path) -> None:
    """New, check and learn; no file is edited on the way."""
    made = fedunfold(
        "env", "new", "sites", "--participation-probability", "west=0.5", "--epochs", 1, "--epochs", "north=2"
    )
    assert made.code == 0, made.err
    assert "3 classes from outcome: died, home, transfer." in made.out
    assert "ward (2)" in made.out and "pressure (" in made.out
    assert made.out.endswith("next:\n  fedunfold env check sites.toml\n  fedunfold learn sites.toml\n")
    env = Environment.from_toml("sites.toml")
    assert [(client.key, client.epochs, client.participation_probability) for client in env.clients] == [
        ("Hospital-A", 1, 1),
        ("north", 2, 1),
        ("south", 1, 1),
        ("west", 1, 0.5),
    ]
    checked = fedunfold("env", "check", "sites.toml", "--format", "json").json
    assert checked["classes"] == ["died", "home", "transfer"]
    assert checked["heterogeneity"]["sole_holders"] == {"died": "west"}
    assert checked["heterogeneity"]["expected_present"] == 3.5
    assert checked["outlook"]["learned_weights"] == "likely"
    shown = fedunfold("env", "check", "sites.toml").out
    (died,) = (client["label_counts"][0] for client in checked["clients"] if client["key"] == "west")
    assert f"{died} died" in shown and "ready" in shown and "Likely" in shown and "west (died)" in shown
    learned = fedunfold("learn", "sites.toml", "--iterations", 1, "--rounds", 2, "--out", "run", "--format", "json")
    assert learned.code == 0, learned.err
    assert Path("run/weights.safetensors").exists()


def numbers(folder: Path, columns: str, row: Callable[[np.random.Generator], str]) -> Path:
    """Three sites with 30 rows each."""
    folder.mkdir()
    stream = np.random.default_rng(0)
    for site in ("a", "b", "c"):
        lines = [columns, *(row(stream) for _ in range(30))]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_column_of_measurements_is_a_regression(fedunfold: Command, tmp_path: Path) -> None:
    def row(stream: np.random.Generator) -> str:
        age = stream.integers(20, 80)
        return f"{age},{stream.normal():.3f},{100 + 2 * age + stream.normal():.2f}"

    numbers(tmp_path / "doses", "age,weight,dose", row)
    made = fedunfold("env", "new", "doses", "--rounds", 4)
    assert made.code == 0, made.err
    assert made.out.startswith("regression of dose.") and "dose was standardised" in made.out
    assert "task regression." in made.out
    env = Environment.from_toml("doses.toml")
    assert env.task == fu.regression() and env.class_names is None
    assert '[task]\nname = "regression"' in Path("doses.toml").read_text(encoding="utf-8")
    pooled = env.load().y.double()
    assert (pooled.mean().item(), pooled.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-5)
    target = json.loads(Path("doses.columns.json").read_text(encoding="utf-8"))["target"]
    assert 100 < target["mean"] < 300
    checked = fedunfold("env", "check", "doses.toml", "--format", "json").json
    assert (checked["task"], checked["classes"]) == ("regression", [])
    assert checked["clients"][0]["targets"].keys() == {"mean", "sd"}
    shown = fedunfold("env", "check", "doses.toml").out
    assert "task regression, 4 rounds; ready." in shown and "of the target's variance lies between clients" in shown
    compared = fedunfold("compare", "doses.toml", "--methods", "fedavg", "--trials", 1).out
    assert "lower is better" in " ".join(compared.split()) and "R²" in compared
    assert "RMSE" in fedunfold("run", "doses.toml").out
    assert "RMSE" in fedunfold("runs", "list").out


def test_times_and_events_are_survival(fedunfold: Command, tmp_path: Path) -> None:
    def row(stream: np.random.Generator) -> str:
        return f"{stream.normal():.3f},{stream.exponential():.3f},{stream.integers(0, 2)}"

    folder = numbers(tmp_path / "wards", "marker,days,died", row)
    made = fedunfold("env", "new", "wards", "--time", "days", "--event", "died", "--format", "json")
    assert made.code == 0, made.err
    assert made.json["task"] == "survival" and made.json["features"] == 1
    env = Environment.from_toml("wards.toml")
    assert env.task == fu.survival() and env.load().y.shape[1] == 2
    checked = fedunfold("env", "check", "wards.toml", "--format", "json").json
    assert checked["clients"][0]["targets"].keys() == {"event_rate", "median_time"}
    to = ("--out", "x.toml")
    refused(fedunfold("env", "new", "wards", "--time", "days", *to), "--event is needed")
    refused(fedunfold("env", "new", "wards", "--time", "days", "--event", "dead", *to), "--event", "dead")
    refused(fedunfold("env", "new", "wards", "--task", "regression", "--time", "days", *to), "--time")
    refused(fedunfold("env", "new", "wards", "--task", "survival", "--label", "died", *to), "--label")
    text = (folder / "b.csv").read_text().replace("\n", "\n0.5,1.5,2\n", 1)
    (folder / "b.csv").write_text(text)
    refused(fedunfold("env", "new", "wards", "--time", "days", "--event", "died", *to), "b.csv", "0 or 1")


@pytest.mark.parametrize(("cell", "what"), [("many", "'many' is no number"), ("", "is empty")])
def test_a_target_that_is_no_number(fedunfold: Command, tmp_path: Path, cell: str, what: str) -> None:
    folder = numbers(tmp_path / "doses", "age,dose", lambda stream: f"{stream.normal():.3f},{stream.normal():.3f}")
    (folder / "b.csv").write_text(f"age,dose\n1,2.5\n3,{cell}\n")
    refused(fedunfold("env", "new", "doses", "--task", "regression"), "b.csv, line 3, column dose", what)


def test_two_values_are_binary(fedunfold: Command, tmp_path: Path) -> None:
    numbers(tmp_path / "cases", "age,ill", lambda stream: f"{stream.normal():.3f},{stream.integers(0, 2)}")
    assert fedunfold("env", "new", "cases").code == 0
    assert Environment.from_toml("cases.toml").task == fu.binary()


def test_an_npz_of_numbers(fedunfold: Command, tmp_path: Path) -> None:
    x, y = np.zeros((6, 2), np.float32), np.arange(6.0)
    np.savez(tmp_path / "n.npz", x_a=x, y_a=y, x_b=x, y_b=y, x_test=x, y_test=y)
    made = fedunfold("env", "new", "n.npz", "--task", "regression", "--format", "json")
    assert made.code == 0, made.err
    assert Environment.from_toml("n.toml").task == fu.regression()


def test_every_setting_by_flags_and_as_json(fedunfold: Command, hospitals: Path) -> None:
    test = hospitals / "north.csv"
    command: tuple[object, ...] = (
        "env",
        "new",
        "sites",
        "--out",
        "new/mine.toml",
        "--name",
        "my sites",
        "--label",
        "ward",
        "--seed",
        4,
    )
    command += ("--test", test, "--drop", "age", "--scaling", "none", "--rounds", 3, "--batch-size", 5, "--lr", 0.2)
    made = fedunfold(*command, "--hidden", "8,4", "--participation-probability", "0.9", "--format", "json")
    assert made.code == 0, made.err
    assert made.json["files"] == ["new/mine.toml", "new/mine.npz", "new/mine.columns.json"]
    assert made.json["clients"] == {"Hospital-A": 30, "south": 50, "west": 60}
    assert made.json["test_samples"] == 40 and made.json["classes"] == ["er", "icu"]
    assert made.json["next"] == ["fedunfold env check new/mine.toml", "fedunfold learn new/mine.toml"]
    env = Environment.from_toml("new/mine.toml")
    assert (env.name, env.rounds, env.batch_size, env.lr, env.seed) == ("my sites", 3, 5, 0.2, 4)
    assert env.model.hidden == (8, 4) and {client.participation_probability for client in env.clients} == {0.9}
    assert env.load().x.shape == (140, 4)  # pressure, and the three outcomes


def test_images(fedunfold: Command, tmp_path: Path) -> None:
    sites.scans(tmp_path / "scans")
    made = fedunfold("env", "new", "scans", "--size", 4, "--hidden", "none")
    assert made.code == 0, made.err
    assert "2 classes from class folders: clear, cloudy." in made.out
    assert Environment.from_toml("scans.toml").load().x.shape == (20, 16)
    assert fedunfold("env", "check", "scans.toml").code == 0
    assert fedunfold("run", "scans.toml", "--format", "json").json["accuracy"] > 90


def test_an_npz_stays_where_it_is(fedunfold: Command, tmp_path: Path) -> None:
    sites.arrays(tmp_path / "own.npz", "a", "b")
    assert fedunfold("env", "new", "own.npz", "--out", "deep/own.toml").code == 0
    assert {path.name for path in Path("deep").iterdir()} == {"own.toml"}
    assert Environment.from_toml("deep/own.toml").load().keys == ("a", "b")
    sites.arrays(tmp_path / "whole.npz", "train")
    dealt = fedunfold("env", "new", "whole.npz", "--partitioner", "dirichlet:alpha=0.5", "--clients", 3, "--seed", 1)
    assert dealt.code == 0, dealt.err
    env = Environment.from_toml("whole.toml")
    assert env.partition.model_dump() == {"kind": "dirichlet", "alpha": 0.5, "seed": 1}
    assert sum(env.load().sizes) == 40


# The library leaves the CSV file that it read to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*own.csv:pytest.PytestUnraisableExceptionWarning")
def test_hugging_face_files(fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
    pytest.importorskip("flwr_datasets", reason="the extra 'datasets' is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "own.csv").write_text("v,y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)))
    command = ("env", "new", "--dataset", "own.csv", "--partitioner", "iid")
    refused(fedunfold(*command), "--clients")
    made = fedunfold(*command, "--clients", 4)
    assert made.code == 0, made.err
    assert made.err == ""
    assert Environment.from_toml("own.toml").load().sizes == (8, 8, 8, 8)
    refused(fedunfold(*command, "--clients", 4, "--out", "b.toml", "--size", 3), "--size")


def test_without_the_extra_the_line_to_type(fedunfold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    outcome = fedunfold("env", "new", "--dataset", "mnist", "--partitioner", "iid", "--clients", 2)
    refused(outcome, "pip install 'fedunfold[datasets]'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("SOURCE", "--dataset")),
        (("sites", "--dataset", "mnist"), ("SOURCE", "--dataset")),
        (("absent",), ("absent", "does not exist")),
        (("sites/west.csv",), ("west.csv", "folder")),
        (("empty",), ("empty", "neither")),
        (("broken.npz",), ("broken.npz",)),
        (("whole.npz",), ("--partitioner is needed",)),
        (("whole.npz", "--partitioner", "iid"), ("--clients is needed",)),
        (("whole.npz", "--partitioner", "shard:shards=2", "--clients", 2), ("iid or dirichlet",)),
        (("whole.npz", "--partitioner", "dirichlet", "--clients", 2), ("dirichlet:alpha=0.3",)),
        (("whole.npz", "--partitioner", "dirichlet:alpha=0", "--clients", 2), ("alpha",)),
        (("whole.npz", "--partitioner", "coins", "--clients", 2), ("coins", "natural:column=NAME")),
        (("whole.npz", "--partitioner", "iid:x=1", "--clients", 2), ("x=1",)),
        (("whole.npz", "--partitioner", "natural:column=site", "--clients", 2), ("--clients",)),
        (("whole.npz", "--label", "y"), ("--label", "an .npz file")),
        (("own.npz", "--clients", 2), ("--clients", "own.npz")),
        (("sites", "--size", 3), ("--size", "CSV files")),
        (("sites", "--label", "nothing"), ("nothing", "outcome")),
        (("sites", "--test", "nowhere.csv"), ("--test", "nowhere.csv")),
        (("sites", "--test", "2"), ("--test", "2")),
        (("sites", "--participation-probability", "mars=0.5"), ("--participation-probability", "mars", "north")),
        (("sites", "--participation-probability", "west=often"), ("--participation-probability", "west=often")),
        (("sites", "--participation-probability", "west=1.5"), ("participation_probability", "1.5")),
        (("sites", "--epochs", "0"), ("epochs", "0")),
        (("sites", "--lr", "-1"), ("lr", "-1")),
        (("sites", "--hidden", "wide"), ("--hidden", "wide")),
        (("sites", "--out", "mine.txt"), ("--out", "mine.txt", ".toml")),
        (("scans", "--model", "vit", "--size", 4), ("--size", "--model")),
        (("scans", "--test", "nowhere"), ("nowhere",)),
    ],
)
def test_refusals(fedunfold: Command, tmp_path: Path, arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    """One line that names the option or file; and nothing is written."""
    sites.hospitals(tmp_path / "sites")
    sites.scans(tmp_path / "scans", 2)
    sites.arrays(tmp_path / "own.npz", "a", "b")
    sites.arrays(tmp_path / "whole.npz", "train")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK")
    before = sorted(tmp_path.iterdir())
    refused(fedunfold("env", "new", *arguments), *words)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_replaced_unasked(fedunfold: Command, hospitals: Path, tmp_path: Path) -> None:
    for name in ("sites.toml", "sites.npz", "sites.columns.json"):
        (tmp_path / name).write_text("mine")
        refused(fedunfold("env", "new", "sites"), name, "--overwrite")
        assert (tmp_path / name).read_text() == "mine"
        if name != "sites.columns.json":
            (tmp_path / name).unlink()
    assert fedunfold("env", "new", "sites", "--overwrite").code == 0
    assert fedunfold("env", "check", "sites.toml").code == 0


def test_a_full_disk_leaves_no_environment(
    fedunfold: Command, hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    refused(fedunfold("env", "new", "sites"), "sites.npz", "No space left")
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


Typed = Callable[..., None]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Someone who answers with these lines."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def type_(*lines: str) -> None:
        monkeypatch.setattr(prompts, "watched", lambda: True)
        monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))

    return type_


def test_what_is_not_given_is_asked_for(fedunfold: Command, hospitals: Path, terminal: Typed) -> None:
    terminal("mine", "", "", "a fifth", "0.4", "7", "", "0.1", "", "none")
    made = fedunfold("env", "new", "sites")
    assert made.code == 0, made.err
    assert "column to predict (age, pressure, ward, outcome) [outcome]:" in made.err
    assert "'a fifth' does not fit here." in made.err
    assert "widths of hidden layers, or none [32]:" in made.err
    env = Environment.from_toml("mine.toml")
    assert (env.rounds, env.lr, env.batch_size, env.model.hidden) == (7, 0.1, 4, ())
    assert len(env.load().y_test) == 72


def test_yes_and_flags_answer_before_anything_is_asked(fedunfold: Command, hospitals: Path, terminal: Typed) -> None:
    terminal()
    made = fedunfold("env", "new", "sites", "--yes")
    assert made.code == 0
    assert [line.split(":")[0] for line in made.err.splitlines()] == ["warning"]  # of a class at one site


def test_leaving_at_a_question(fedunfold: Command, hospitals: Path, tmp_path: Path, terminal: Typed) -> None:
    terminal("mine")  # and then the end of the input
    left = fedunfold("env", "new", "sites")
    assert left.code == 130 and left.err.endswith("stopped; nothing was written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]
