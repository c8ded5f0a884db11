"""Over Flower's own simulation, in processes of its own, the numbers are the engine's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.everything import TOLERANCE, assert_same

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.network, pytest.mark.slow]


def test_models_gradients_and_weights_are_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    program = [sys.executable, "-m", "tests.support.ray_simulation", str(file)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=300, capture_output=True)
    found = json.loads(file.read_text())
    for precision in TOLERANCE:
        assert_same(found[precision]["flower"], found[precision]["simulation"], precision)
