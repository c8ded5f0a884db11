"""The example app, as its launcher runs it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow]
APP = Path(__file__).parents[3] / "examples" / "flower"
sys.path.insert(0, str(APP))
from simulate import stopped  # noqa: E402  (the app's folder is no package)


def test_the_app_learns_trains_and_its_superlink_is_stopped(tmp_path: Path) -> None:
    program = [sys.executable, str(APP / "simulate.py"), "iterations=1", "rounds=3", f'folder="{tmp_path}"']
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=400)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.findall(r"(\w+): accuracy \d+\.\d % after 3 rounds", ended.stdout) == ["learned", "size"]
    assert (tmp_path / "weights.safetensors").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(re.findall("report: (.*)", ended.stdout)[0]) == report
    assert report["failures"] == {}
    took = re.findall(r"(\d+) s, at most (\d+) MiB in all processes", ended.stdout)
    assert took and int(took[0][1]) > 100
    listening = re.search(r"Using SuperLink: here \(127\.0\.0\.1:(\d+)\)", ended.stdout)
    assert listening, "the launcher's own SuperLink was not used"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(listening[1]))) != 0, "the SuperLink still listens"


def test_what_a_process_started_is_stopped_with_it() -> None:
    """Also what has a session of its own, as Flower's SuperExec has."""
    program = "setsid sleep 300 & echo $!; sleep 300"
    process = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with stopped(process), process.stdout:
        child = int(process.stdout.readline())
        until(lambda: os.getsid(child) == child)
    until(lambda: not Path("/proc", str(child)).exists())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
