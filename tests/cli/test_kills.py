"""A short version of the study of kills; `python -m tests.support.kills` is the long one."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_few_kills() -> None:
    """In a process of its own: it forks, and this one may have threads."""
    command = [sys.executable, "-m", "tests.support.kills", "--kills", "4", "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("2 of 2 ended with the same bytes") == 2
