"""What the example deployment says before it starts anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

APP = Path(__file__).parents[3] / "examples" / "flower"
sys.path.insert(0, str(APP))
from deploy import PATIENTLY, QUICKLY, chosen_settings, plan  # noqa: E402  (the app's folder is no package)


def test_a_quick_run_unless_something_else_is_said() -> None:
    assert chosen_settings([], full=False) == PATIENTLY | QUICKLY
    assert chosen_settings([], full=True) == PATIENTLY
    given = ["rounds=5", 'method="fedavg" folder="a b"']
    expected = {"iterations": "2", "rounds": "5", "method": '"fedavg"', "folder": '"a b"'}
    assert chosen_settings(given, full=False) == PATIENTLY | expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("itrations=5", "the app has no setting 'itrations'; did you mean 'iterations'?"),
        ("colour=5", "the app has no setting 'colour'; there are method, absent,"),
        ("iterations=five", "iterations is a whole number, not five."),
        ("iterations=2.5", "iterations is a whole number, not 2.5."),
        ("method=fedavg", """method is a text in quotes, as 'method="…"', not fedavg."""),
        ("secure-aggregation=1", "secure-aggregation is true or false, not 1."),
        ("lr='a'", "lr is a number, not 'a'."),
        ("rounds=3 quickly", "'quickly' is no setting; give a name and a value"),
    ],
)
def test_a_wrong_setting_starts_nothing(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        chosen_settings([given], full=True)
    program = [sys.executable, str(APP / "deploy.py"), given]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_numbers_may_be_whole() -> None:
    assert chosen_settings(["lr=1", "timeout=5"], full=True) == PATIENTLY | {"lr": "1", "timeout": "5"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (QUICKLY, ["2 outer steps over 2 rounds", "about 11 messages", "2 min on 2 cores"]),
        ({}, ["15 outer steps over 10 rounds", "about 186 messages", "31 min on 2 cores"]),
        ({"method": '"fedavg"', "rounds": "3"}, ["trains with size weights, 3 rounds", "about 4 messages", "1 min"]),
        ({"method": '"fedprox"', "rounds": "3"}, ["SuperNodes on 127.0.0.1", "with them and", "about 7 messages"]),
    ],
    ids=str,
)
def test_the_plan_counts_what_is_sent(settings: dict[str, str], said: list[str]) -> None:
    found = plan(settings, 2)
    assert all(part in found for part in said), found
    assert ("learns weights" in found) == ("outer steps" in said[0])


def test_help_and_plan_start_nothing() -> None:
    def run(*arguments: str) -> str:
        program = [sys.executable, str(APP / "deploy.py"), *arguments]
        return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "--full" in run("--help")
    assert "This starts a SuperLink and 5 SuperNodes" in run("--plan", "rounds=3")
