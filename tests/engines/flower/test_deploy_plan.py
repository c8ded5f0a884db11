"""What the example deployment says before it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest

APP = Path(__file__).parents[3] / "examples" / "flower"
sys.path.insert(0, str(APP))
from deploy import QUICKLY, chosen_settings, plan  # noqa: E402  (the app's folder is no package)


def test_a_quick_run_unless_something_else_is_said() -> None:
    assert chosen_settings([], full=False) == QUICKLY
    assert chosen_settings([], full=True) == {}
    given = ["rounds=5", 'method="fedavg" folder="a b"']
    expected = {"iterations": "2", "rounds": "5", "method": '"fedavg"', "folder": '"a b"'}
    assert chosen_settings(given, full=False) == expected


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
