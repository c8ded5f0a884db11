"""Runs on disk: read whatever is in the folder, and delete only what is the run's."""

import json
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedunfold.core.errors import InputError
from fedunfold.runs.catalog import delete_run, differing, find_run, runs_in, summarize

ROUND = {"method": "fedavg", "trial": 0, "round": 1, "accuracy": 81.5, "loss": 0.5}
LEARNED = {"command": "learn", "environment": "sites", "learning": {"iterations": 2}, "seed": 0}


def made(folder: Path, about: dict[str, Any], **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    names = [name.replace("_", ".") for name in files]
    (folder / "settings.json").write_text(json.dumps({**about, "files": names}))
    return folder


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def learned(folder: Path, iterations: int = 2, **changes: Any) -> Path:
    losses = [{"iteration": m, "outer_loss": 9.0 - m} for m in range(iterations)]
    return made(folder, {**LEARNED, **changes}, metrics_jsonl=lines(*losses), weights_png="…")


def test_a_finished_learning(tmp_path: Path) -> None:
    run = summarize(learned(tmp_path / "a"))
    assert (run.state, run.problem, run.methods) == ("finished", "", [])
    assert run.results == [{"iteration": 1, "outer_loss": 8.0}]
    assert run.size == sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert run.made is not None


def test_a_learning_that_was_stopped(tmp_path: Path) -> None:
    run = summarize(learned(tmp_path / "a", iterations=1))
    assert (run.state, run.problem) == ("unfinished", "1 of 2 outer iterations")


def test_a_comparison_that_lacks_a_method(tmp_path: Path) -> None:
    rows = [{"method": "fedavg", "accuracy_mean": 80.0, "accuracy_sd": 1.0, "rounds": [1, 2]}]
    about = {"command": "compare", "environment": "sites", "methods": ["fedavg", "fednova"], "trials": 2}
    run = summarize(made(tmp_path / "a", about, result_json=json.dumps({"methods": rows})))
    assert (run.state, run.problem, run.methods) == ("unfinished", "1 of 2 methods", ["fedavg", "fednova"])
    assert run.results == [{"method": "fedavg", "accuracy_mean": 80.0, "accuracy_sd": 1.0, "trials": 0}]


def test_a_comparison_that_lacks_trials(tmp_path: Path) -> None:
    about = {"command": "compare", "environment": "sites", "methods": ["fedavg", "fednova"], "trials": 2}
    rounds = [(name, trial, t) for name, trial in (("fedavg", 0), ("fedavg", 1), ("fednova", 0)) for t in range(3)]
    metrics = lines(*({"method": name, "trial": trial, "round": t} for name, trial, t in rounds))
    rows = json.dumps({"methods": [{"method": "fedavg"}, {"method": "fednova"}]})
    run = summarize(made(tmp_path / "a", about, result_json=rows, metrics_jsonl=metrics))
    assert (run.state, run.problem) == ("unfinished", "1 of 2 trials of fednova")


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    live = tmp_path / "a" / "progress.jsonl"
    live.write_text(lines({"began": {"command": "run", "environment": "sites"}}, ROUND) + '{"method": "fed')
    run = summarize(tmp_path / "a")
    assert (run.state, run.settings["environment"]) == ("unfinished", "sites")
    assert run.results == [{"method": "fedavg", "round": 1, "accuracy": 81.5, "loss": 0.5}]
    delete_run(run)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("settings.json", "{cut", "settings.json is no JSON"),
        ("settings.json", "[" * 100_000, "settings.json is no JSON"),
        ("settings.json", '{"command": 3, "files": []}', "settings.json cannot be read as that of a run"),
        ("settings.json", '{"command": "run", "files": [], "lr": NaN}', "numbers that are none"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        ("metrics.jsonl", "nothing\n", "metrics.jsonl, line 1, is no JSON"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl, line 1, holds no JSON object"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("result.json", "{}", "result.json has no rows"),
        ("environment.toml", "= =", "environment.toml is not valid TOML"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, content: str | None, problem: str) -> None:
    files = {"metrics_jsonl": lines(ROUND), "environment_toml": ""}
    files |= {"result_json": '{"methods": []}'} if file == "result.json" else {}
    folder = made(tmp_path / "a", {"command": "run"}, **files)
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    run = summarize(folder)
    assert run.state == "damaged"
    assert problem in run.problem


FILES = ("settings.json", "metrics.jsonl", "result.json", "progress.jsonl", "environment.toml")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("methods", "learning")), inner),
    max_leaves=6,
)
KNOWN = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("command", "environment", "methods", "method", "learning", "began", "iteration"), JSON),
        **dict.fromkeys(("accuracy", "accuracy_mean", "outer_loss", "clients"), JSON),
        "files": st.lists(st.sampled_from(FILES)) | JSON,
    },
)
CONTENT = st.binary(max_size=40) | KNOWN.map(lambda value: json.dumps(value).encode())


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FILES), CONTENT, min_size=1))
def test_whatever_is_in_the_files_is_read_or_called_damaged(content: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        for file, data in content.items():
            (Path(name) / file).write_bytes(data)
        run = summarize(Path(name))
        assert run.state in ("finished", "unfinished", "damaged")
        json.dumps(run.as_json(), allow_nan=False)
        differing([run, run])


NAMES = st.text(string.ascii_lowercase + "./\\\0 é", max_size=12) | st.sampled_from(
    ["../outside", "/etc/hostname", "sub/inside", "..", ".", "", "link", "x" * 300, "settings.json"]
)


@settings(max_examples=100)
@given(st.lists(NAMES | st.integers(), max_size=6))
def test_deleting_never_leaves_the_folder(listed: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        outside, folder = Path(name, "outside"), Path(name, "run")
        (folder / "sub").mkdir(parents=True)
        for file in (outside, folder / "sub" / "inside", folder / "Notes"):
            file.write_text("mine")
        (folder / "link").symlink_to(outside)
        (folder / "settings.json").write_text(json.dumps({"command": "run", "files": listed}))
        left = delete_run(summarize(folder))
        assert set(left) >= {"sub", "Notes"} and "settings.json" not in left
        assert ("link" in left) == ("link" not in listed)
        assert outside.read_text() == (folder / "sub" / "inside").read_text() == (folder / "Notes").read_text()


def test_only_runs_are_found(tmp_path: Path) -> None:
    learned(tmp_path / "runs" / "b")
    learned(tmp_path / "runs" / "a")
    learned(tmp_path / "elsewhere")
    (tmp_path / "runs" / "tensorboard").mkdir()
    (tmp_path / "runs" / "notes.txt").touch()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert [run.name for run in runs_in(tmp_path / "runs")] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digitz", "did you mean 'digits'"),
        ("tensorboard", "not a run folder"),
        ("link", "is not in"),
        ("loop", "is a link"),
        ("../elsewhere", "is not in"),
        ("..", "is not in"),
        (".", "is not in"),
        ("", "is not in"),
        ("digits/sub", "is not in"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    folder = tmp_path / "runs"
    learned(folder / "digits")
    learned(folder / "digits" / "sub")
    learned(tmp_path / "elsewhere")
    (folder / "tensorboard").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder / "digits")
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=message):
        find_run(name, folder)


@pytest.mark.parametrize("name", ["digits", "runs/digits", "./runs/../runs/digits"])
def test_names_and_paths_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    learned(tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)
    assert find_run(name, Path("runs")).path == Path("runs/digits")


def test_what_differs(tmp_path: Path) -> None:
    toml = 'rounds = 3\n[[clients]]\nkey = "a"\nepochs = {}\n'
    runs = []
    for seed, epochs in ((0, 1), (7, 2)):
        about = {"command": "run", "environment": "sites", "method": "fedavg", "seed": seed}
        metrics = lines({**ROUND, "accuracy": 80.0 + seed})
        folder = made(tmp_path / str(seed), about, metrics_jsonl=metrics, environment_toml=toml.format(epochs))
        runs.append(summarize(folder))
    runs.append(summarize(learned(tmp_path / "c", environment="sites")))
    found, results = differing(runs[:2])
    assert found == {"seed": [0, 7], "environment.toml.clients.a.epochs": [1, 2]}
    assert results == {"fedavg: accuracy": [80.0, 87.0], "fedavg: loss": [0.5, 0.5]}
    found, results = differing(runs)
    assert found["learning.iterations"] == [None, None, 2]
    assert results["learned: outer loss"] == [None, None, 8.0]


def test_a_folder_with_only_checkpoints_is_a_run_and_goes_whole(tmp_path: Path) -> None:
    checkpoints = tmp_path / "a" / "unfinished"
    checkpoints.mkdir(parents=True)
    (checkpoints / "run_spec.json").write_text("{}")
    (run,) = runs_in(tmp_path)
    assert (run.state, run.made is not None) == ("unfinished", True)
    delete_run(run)
    assert not (tmp_path / "a").exists()


def test_what_goes_on_is_unfinished_beside_its_settings(tmp_path: Path) -> None:
    (learned(tmp_path / "a") / "unfinished").mkdir()
    (tmp_path / "a" / "unfinished" / "run_spec.json").write_text("{}")
    assert summarize(tmp_path / "a").state == "unfinished"


def test_a_report_made_later_changes_neither_date_nor_size(tmp_path: Path) -> None:
    before = summarize(learned(tmp_path / "a"))
    (tmp_path / "a" / "report.html").write_text("made later")
    after = summarize(tmp_path / "a")
    assert (before.made, before.size) == (after.made, after.size)


def test_numbers_that_no_float_can_be_are_passed_over(tmp_path: Path) -> None:
    run = summarize(made(tmp_path / "a", {"command": "run"}, metrics_jsonl=lines({**ROUND, "accuracy": 10**400})))
    assert "accuracy" not in run.results[0]


def test_checkpoints_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run_spec.json").write_text("{}")
    folder = learned(tmp_path / "a")
    (folder / "unfinished").symlink_to(tmp_path / "elsewhere")
    assert delete_run(summarize(folder)) == ["unfinished"]
    assert (tmp_path / "elsewhere" / "run_spec.json").exists()
