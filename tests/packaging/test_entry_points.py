"""A package from outside, installed beside this one: its parts are found by name, trained with and learned through."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "support" / "outside_package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip puts it; nothing is downloaded, and this environment stays as it is."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    quiet = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder / "site"), str(folder / "source")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "site"


def python(installed: Path, *arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """With the package on the path, and without what this process already knows of entry points."""
    path = os.pathsep.join([str(installed), str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_compare_and_learn_through_it(installed: Path) -> None:
    ended = python(installed, "-m", "tests.support.check_outside_parts")
    assert ended.returncode == 0, ended.stderr


TYPING = """
import contextlib, io, json, sys
from fedunfold.cli import main
for line in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*line, "--rounds", "1"])
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def typed(installed: Path, folder: Path, *lines: list[str]) -> list[tuple[int, str, str]]:
    """Exit codes and what is printed by several commands, one after the other in a process that loads torch once."""
    ended = python(installed, "-c", TYPING, json.dumps(lines), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_the_command_line_takes_its_parts_by_name(installed: Path, tmp_path: Path) -> None:
    compared = ["compare", "digits-label-skew", "--methods", "fedavg,power-of-size-fedavg", "--trials", "1"]
    compared += ["--local", "rmsprop:decay=0.2", "--server", "lookahead", "--format", "json"]
    ran = ["run", "digits-label-skew", "--format", "json", "--rule"]
    comparison, run, misspelt = typed(
        installed, tmp_path, compared, [*ran, "power-of-size:power=0"], [*ran, "power-of-sizes"]
    )
    assert comparison[0] == 0, comparison[2]
    names = [method["method"] for method in json.loads(comparison[1])["methods"]]
    assert [name.split()[0] for name in names] == ["fedavg", "power-of-size-fedavg"]
    assert run[0] == 0, run[2]
    assert json.loads(run[1])["weights"] == [pytest.approx([0.2] * 5)]
    assert misspelt[0] == 2
    assert "did you mean 'power-of-size'?" in misspelt[2]


def test_without_it_its_names_are_unknown(tmp_path: Path) -> None:
    ((code, _, error),) = typed(ROOT / "src", tmp_path, ["run", "digits-label-skew", "--rule", "power-of-size"])
    assert code == 2
    assert "unknown rule 'power-of-size'; choose one of size" in error
