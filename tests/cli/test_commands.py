"""What a newcomer types, and what comes back."""

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedunfold import __version__
from fedunfold.cli import console
from fedunfold.config import bundled
from fedunfold.rules.learned import LearnedWeights
from tests.cli.conftest import Command


def test_version(fedunfold: Command) -> None:
    assert fedunfold("--version").out.strip() == f"fedunfold {__version__}"


def test_environments(fedunfold: Command, tmp_path: Path) -> None:
    listed = [entry["name"] for entry in fedunfold("env", "list", "--format", "json").json]
    assert tuple(listed) == bundled()
    assert "digits-flaky" in fedunfold("env", "list").out
    copy = tmp_path / "copy.toml"
    copy.write_text(fedunfold("env", "show", "digits-label-skew").out)
    checked = fedunfold("env", "check", copy, "--format", "json").json
    assert checked["test_samples"] == 500
    assert checked["clients"][0]["label_counts"] == [0, 0, 127, 0, 0, 0, 0, 0, 0, 130]
    assert "ready" in fedunfold("env", "check", copy).out
    assert checked["server_samples"] == 0
    assert "server" not in fedunfold("env", "check", copy).out


def test_rows_of_the_server(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    """Also of data that come divided."""
    env = two_sites(extra="server_rows = 5")
    checked = fedunfold("env", "check", env, "--format", "json").json
    assert checked["server_samples"] == 5
    assert sum(client["samples"] for client in checked["clients"]) == 9 + 6 - 5
    assert "The server holds 5 samples itself" in " ".join(fedunfold("env", "check", env).out.split())
    compared = fedunfold("compare", env, "--methods", "fedavg,fedlaw", "--trials", 2, "--format", "json").json
    assert [entry["method"] for entry in compared["methods"]] == ["fedavg", "fedlaw"]
    failed = fedunfold("run", two_sites(), "--method", "fedlaw")
    assert failed.code != 0
    assert "rule 'fedlaw' reads data of the server, and the server has none here" in " ".join(failed.err.split())


def test_learn_then_run_then_compare(fedunfold: Command, two_sites: Callable[..., Path], tmp_path: Path) -> None:
    env, out = two_sites(), tmp_path / "learned"
    learned = fedunfold("learn", env, "--out", out, "--iterations", 3, "--format", "json").json
    assert learned["clients"] == ["a", "b"]
    assert len(learned["outer_loss"]) == 3
    assert [file.name for file in out.glob("*.safetensors")] == ["weights.safetensors"]
    assert {"settings.json", "environment.toml", "metrics.jsonl", "weights.png", "outer_loss.png"} <= {
        file.name for file in out.iterdir()
    }
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"iteration": m, "outer_loss": loss} for m, loss in enumerate(learned["outer_loss"])]

    weights = out / "weights.safetensors"
    ran = fedunfold("run", env, "--weights", weights, "--format", "json", "--out", tmp_path / "run").json
    assert ran["weights"] == learned["weights"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3

    compared = fedunfold("compare", env, "--methods", f"fedavg,{weights}", "--trials", 2, "--format", "json").json
    assert set(compared) == {"verdict", "warnings", "environment", "trials", "metric", "methods", "folder"}
    assert compared["verdict"]["method"] in ("fedavg", "learned")
    assert compared["environment"] == "two-sites"
    assert compared["trials"] == 2
    assert [entry["method"] for entry in compared["methods"]] == ["fedavg", "learned"]
    for entry in compared["methods"]:
        assert set(entry) == {"method", "reference", "accuracy_mean", "accuracy_sd", "metrics", "rounds", "warnings"}
        assert entry["rounds"][-1] == pytest.approx(entry["accuracy_mean"])
        assert 0 <= entry["accuracy_mean"] <= 100


def test_compare_writes_records_and_figures(fedunfold: Command, two_sites: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "compared"
    shown = fedunfold(
        "compare",
        two_sites(),
        "--methods",
        "fednova,duw-fednova",
        "--trials",
        2,
        "--iterations",
        2,
        "--out",
        out,
    )
    assert shown.code == 0
    assert "duw-fednova" in shown.out
    assert {file.name for file in out.iterdir()} == {
        "settings.json",
        "environment.toml",
        "federation.json",
        "result.json",
        "metrics.jsonl",
        "client_scores.jsonl",
        "accuracy.png",
        "duw-fednova.safetensors",
        "duw-fednova-weights.png",
        "duw-fednova-outer-loss.png",
    }
    assert LearnedWeights.load(out / "duw-fednova.safetensors").settings["algorithm"]["local"]["name"] == "nova"


@pytest.mark.parametrize(
    "parts",
    [
        ("--rule", "dr:q=2", "--absent", "drop"),
        ("--local", "prox:mu=0.1", "--server", "adam:lr=0.05", "--absent", "remember"),
        ("--rule", "fedadp:beta=5", "--local", "momentum:rho=0.5"),
        ("--rule", "fedfa", "--local", "accumulated-prox:mu=0.1", "--server", "yogi"),
        ("--method", "dr-fednova", "--dtype", "float64"),
    ],
)
def test_free_combinations_run(fedunfold: Command, two_sites: Callable[..., Path], parts: tuple[str, ...]) -> None:
    ran = fedunfold("run", two_sites(participation_probability=0.5), *parts, "--format", "json")
    assert ran.code == 0, ran.err
    assert len(ran.json["rounds"]) == 3


def test_weights_are_mapped_on_request(fedunfold: Command, two_sites: Callable[..., Path], tmp_path: Path) -> None:
    env = two_sites()
    fedunfold("learn", env, "--out", tmp_path / "w", "--iterations", 1)
    weights = tmp_path / "w" / "weights.safetensors"
    longer = ("run", env, "--rounds", 5, "--weights", weights)
    refused = fedunfold(*longer)
    assert refused.code == 2
    assert "3 rounds" in refused.err
    rows = fedunfold(*longer, "--map", "--format", "json").json["weights"]
    assert rows[2] == rows[3] == rows[4]


def test_weights_of_two_runs_in_one_comparison(
    fedunfold: Command, two_sites: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = two_sites()
    for name, iterations in (("a", 1), ("b", 2)):
        fedunfold("learn", env, "--out", name, "--iterations", iterations)
    (tmp_path / "b" / "weights.safetensors").rename(tmp_path / "b" / "other.safetensors")
    given = ("--methods", "a/weights.safetensors,b/other.safetensors", "--trials", 1, "--format", "json")
    assert [entry["method"] for entry in fedunfold("compare", env, *given).json["methods"]] == ["a", "other"]
    (tmp_path / "b" / "other.safetensors").rename(tmp_path / "b" / "weights.safetensors")
    given = ("--methods", "a/weights.safetensors,b/weights.safetensors", "--trials", 1, "--format", "json")
    assert [entry["method"] for entry in fedunfold("compare", env, *given).json["methods"]] == ["a", "b"]
    monkeypatch.chdir(tmp_path / "a")
    assert fedunfold("run", env, "--weights", "weights.safetensors", "--format", "json").json["method"] == "a"


def test_same_seed_same_bytes(fedunfold: Command, two_sites: Callable[..., Path], tmp_path: Path) -> None:
    env = two_sites(participation_probability=0.6)
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        fedunfold("learn", env, "--out", tmp_path / name, "--iterations", 2, "--seed", seed)
    one, two, three = ((tmp_path / n / "weights.safetensors").read_bytes() for n in ("one", "two", "three"))
    assert one == two
    assert one != three


def test_nothing_but_the_document_on_stdout_and_no_bars_when_piped(
    fedunfold: Command, two_sites: Callable[..., Path]
) -> None:
    shown = fedunfold("learn", two_sites(), "--iterations", 2, "--format", "json")
    assert shown.json["iterations"] == 2
    assert shown.err == ""


def test_the_published_schedule_is_the_environments_own(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    env = two_sites(extra="[paper_schedule]\niterations = 3\nlr = 0.01")
    assert fedunfold("learn", env, "--schedule", "paper", "--format", "json").json["iterations"] == 3


def test_who_was_set_aside_is_shown_and_kept(fedunfold: Command, tmp_path: Path) -> None:
    """Six sites, of which one keeps its numbers in other units."""
    stream = np.random.default_rng(0)
    arrays = {"x_test": stream.normal(size=(9, 4)), "y_test": np.arange(9) % 3}
    for site in "abcdef":
        arrays[f"x_{site}"] = stream.normal(size=(12, 4)) * (1000 if site == "f" else 1)
        arrays[f"y_{site}"] = np.arange(12) % 3
    np.savez(tmp_path / "six.npz", **arrays)  # type: ignore[arg-type]
    head = 'name = "six"\nrounds = 2\nbatch_size = 6\nlr = 0.1\npartition.kind = "given"\n'
    data = 'data = { source = "npz", path = "six.npz" }\n'
    sites = "".join(f'[[clients]]\nkey = "{site}"\n' for site in "abcdef")
    (tmp_path / "six.toml").write_text(head + data + sites)
    shown = fedunfold("run", "six.toml", "--filter", "norm", "--absent", "drop", "--out", "kept").out
    assert "note: client f was rejected in rounds 1 and 2 of 2: it sends an update " in shown
    lines = [json.loads(line) for line in Path("kept/metrics.jsonl").read_text().splitlines()]
    assert [list(line["rejected"]) for line in lines] == [["f"], ["f"]]
    assert lines[0]["rejected"]["f"].startswith("sends an update ")
    ran = fedunfold("run", "six.toml", "--filter", "norm", "--format", "json").json
    assert [(entry["round"], entry["client"]) for entry in ran["rejected"]] == [(0, "f"), (1, "f")]
    compared = fedunfold(
        *("compare", "six.toml", "--methods", "fedavg,krum-fedavg", "--trials", 1, "--filter", "norm"), "--out", "both"
    ).out
    assert "note: fedavg filter norm: trial 0: client f was rejected" in compared
    learned = fedunfold("learn", "six.toml", "--filter", "norm", "--iterations", 1, "--format", "json").json
    assert learned["warnings"][0].startswith("while learning, client f was rejected in 2 of 2 rounds;")


def test_learning_ends_with_a_command_that_works(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    said = fedunfold("learn", two_sites(), "--iterations", 1, "--seed", 3, "--rounds", 2).out.splitlines()[-1]
    program, *words = shlex.split(said.partition(": ")[2])
    compared = fedunfold(*words, "--trials", 1, "--format", "json")
    assert (program, compared.code, compared.err) == ("fedunfold", 0, "")
    assert len(compared.json["methods"]) == 2


def test_one_trial_has_no_spread(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    env = two_sites()
    assert "±" not in fedunfold("compare", env, "--methods", "fedavg", "--trials", 1).out.splitlines()[-2]
    assert " ± " in fedunfold("compare", env, "--methods", "fedavg", "--trials", 2).out


def test_clients_are_tested_on_what_they_hold_out(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    command = ("compare", two_sites(), "--methods", "fedavg", "--trials", 1, "--holdout", 0.25)
    shown = fedunfold(*command)
    assert shown.code == 0, shown.err
    assert "worst" in shown.out and "client" in shown.out
    (method,) = fedunfold(*command, "--format", "json").json["methods"]
    held = method["held_out"]
    assert held["worst"] == min(held["clients"].values()) and held["clients"][held["worst_client"]] == held["worst"]
    assert "holdout = 0.25" in Path("runs/compare-two-sites/environment.toml").read_text(encoding="utf-8")
    refused = fedunfold(*command[:-1], 1.5)
    assert refused.code == 2 and "holdout" in refused.err
    both = fedunfold(*command, "--leave-out")
    assert (both.code, both.out) == (2, "") and "leave --holdout out" in both.err


def test_references_and_fine_tuned_models_stand_beside_methods(
    fedunfold: Command, two_sites: Callable[..., Path]
) -> None:
    command = ("compare", two_sites(), "--methods", "fedavg,local,pooled,majority", "--trials", 1, "--personal", "own")
    refused = fedunfold(*command)
    assert (refused.code, refused.out) == (2, "") and "as in --holdout 0.2." in refused.err
    shown = fedunfold(*command, "--holdout", 0.25)
    assert shown.code == 0, shown.err
    text = " ".join(shown.out.split())
    assert "majority (reference)" in text and "fedavg, fine-tuned" in text and "on what each client held out" in text
    rows = fedunfold(*command, "--holdout", 0.25, "--format", "json").json["methods"]
    assert [(row["method"], row["reference"], "fine_tuned" in row) for row in rows] == [
        ("fedavg", False, True),
        ("local", True, False),
        ("pooled", True, False),
        ("majority", True, False),
    ]
    wrong = fedunfold(*command[:-1], "some", "--holdout", 0.25)
    assert wrong.code == 2 and "not 'some'" in wrong.err
    both = fedunfold(*command, "--leave-out")
    assert (both.code, both.out) == (2, "") and "leave --personal out" in both.err


def test_each_client_is_left_out_in_turn(fedunfold: Command, two_sites: Callable[..., Path]) -> None:
    command = (
        "compare",
        two_sites(),
        "--methods",
        "fedavg,duw-fedavg",
        "--trials",
        2,
        "--iterations",
        1,
        "--leave-out",
    )
    shown = fedunfold(*command)
    assert shown.code == 0, shown.err
    assert "trained without it" in " ".join(shown.out.split()) and shown.out.endswith("runs/compare-two-sites\n")
    found = fedunfold(*command, "--format", "json").json
    assert [row["method"] for row in found["methods"]] == ["fedavg", "duw-fedavg"]
    assert set(found["methods"][0]["left_out"]) == {"a", "b"}
    told = fedunfold("report", "runs/compare-two-sites")
    worst = found["methods"][0]["worst"]
    assert f"and the worst {worst:.1f} % at {found['methods'][0]['worst_client']}" in told.out
    page = Path("runs/compare-two-sites/report.html").read_text(encoding="utf-8")
    assert "of models that were trained without it" in page and "Not in this report" not in page
    (listed, _) = fedunfold("runs", "list", "--format", "json").json
    assert (listed["state"], listed["results"][0]["method"]) == ("finished", "fedavg")


def test_a_narrow_terminal_cuts_no_digit_off() -> None:
    shown = io.StringIO()
    heads, row = ("method", "mean ± sd", "gain"), ("fedavg", "46.99 ± 0.075", "+0.298712")
    Console(width=24, file=shown).print(console.table("", heads, [row]))
    assert "…" not in shown.getvalue()
