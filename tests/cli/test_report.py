"""`fedunfold report` on the folders that the other commands leave."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused
from tests.support.run_records import write_run

pytest.importorskip("plotly", reason="the report needs plotly (extra report)")

Federation = Callable[..., Path]


def test_folders_of_every_command_alone_and_together(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites(participation_probability=0.5)
    fedunfold("learn", env, "--iterations", 2, "--out", "learn")
    fedunfold("run", env, "--weights", "learn/weights.safetensors", "--out", "run")
    fedunfold("compare", env, "--methods", "fedavg,duw-fedavg", "--trials", 2, "--iterations", 1, "--out", "compare")
    (tmp_path / "data.npz").unlink()  # the data are gone, and the folders enough
    for folder in ("learn", "run", "compare"):
        made = fedunfold("report", folder)
        assert made.code == 0, made.err
        assert made.out.endswith(f"the report is in {folder}/report.html\n")
        assert "two-sites" in (tmp_path / folder / "report.html").read_text(encoding="utf-8")
    made = fedunfold("report", "learn", "run", "compare", "--out", "all/of-them.html", "--format", "json")
    assert made.err == ""
    assert (made.json["file"], made.json["runs"]) == ("all/of-them.html", ["learn", "run", "compare"])
    assert {entry["about"] for entry in made.json["findings"]} == {"two-sites"}
    compared = json.loads((tmp_path / "compare" / "result.json").read_text())["methods"]
    told = " ".join(entry["text"] for entry in made.json["findings"])
    for entry in compared:
        assert f"{entry['accuracy_mean']:.1f} ± {entry['accuracy_sd']:.1f} %" in told
    assert "client b holds the only samples of class 2" in told
    (judged,) = made.json["verdicts"]
    assert (judged["about"], judged["learning_rounds"] > 0) == ("two-sites", judged["method"].startswith("duw"))


def test_a_comparison_opens_with_the_verdict_of_its_report(
    fedunfold: Command, two_sites: Federation, tmp_path: Path
) -> None:
    env = two_sites()
    given = "--methods", "fedavg,uniform-fedavg,local", "--trials", 2, "--holdout", 0.25
    text = fedunfold("compare", env, *given, "--out", "text").out
    shown = fedunfold("compare", env, *given, "--out", "json", "--format", "json").json
    assert next(iter(shown)) == "verdict"
    assert text.startswith(shown["verdict"]["sentence"] + "\n")
    assert shown["verdict"]["over_alone"]["covers"] == ["trials", "test samples"]
    (reported,) = fedunfold("report", "json", "--format", "json").json["verdicts"]
    assert reported == {"about": "two-sites"} | shown["verdict"], "the folder says what the comparison said"
    assert fedunfold("report", "text").out.startswith(shown["verdict"]["sentence"] + "\n")


def test_a_report_is_made_again_without_being_asked(fedunfold: Command, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "kept")
    for _ in range(2):
        assert fedunfold("report", folder).code == 0
    assert fedunfold("report", folder, "--format", "json").json["file"] == str(folder / "report.html")


def test_a_run_that_is_replaced_takes_its_report_along(
    fedunfold: Command, two_sites: Federation, tmp_path: Path
) -> None:
    env = two_sites()
    fedunfold("run", env, "--out", "kept")
    fedunfold("report", "kept")
    assert fedunfold("run", env, "--out", "kept", "--overwrite", "--seed", 1).code == 0
    assert not (tmp_path / "kept" / "report.html").exists()


def test_what_cannot_be_reported(fedunfold: Command, tmp_path: Path) -> None:
    kept, other = write_run(tmp_path / "kept"), write_run(tmp_path / "other")
    refused(fedunfold("report", tmp_path / "nowhere"), "nowhere")
    refused(fedunfold("report", tmp_path), "settings.json")
    refused(fedunfold("report", kept, other), "--out")
    refused(fedunfold("report", kept, kept, "--out", "both.html"), "twice")
    refused(fedunfold("report", kept, "--out", other), "is a folder")
    (tmp_path / "file").touch()
    refused(fedunfold("report", kept, "--out", tmp_path / "file" / "report.html"), "cannot write")
    (kept / "metrics.jsonl").write_text("{cut")
    refused(fedunfold("report", kept), "metrics.jsonl, line 1")
    assert not (kept / "report.html").exists()
    assert not (tmp_path / "both.html").exists()
