"""Programs of the benchmark, and how much memory a process takes."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedunfold.core.errors import FedunfoldError, InputError

STATUS = Path("/proc/self/status")


def run_python(*arguments: str) -> str:
    """What this interpreter prints when it is given these arguments, in a process of its own."""
    return run_program([sys.executable, *arguments])


def run_program(command: Sequence[str]) -> str:
    """What a program prints."""
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}.") from error
    if ended.returncode:
        raise FedunfoldError(f"a program of the benchmark failed: {ended.stderr.strip()[-2000:]}")
    return ended.stdout


def check_memory_can_be_measured() -> None:
    if not STATUS.exists():
        raise InputError(f"the benchmark measures memory by {STATUS}, which only Linux has.")


def grown(action: Callable[[], object]) -> int:
    """Bytes by which this process' largest size grows while something is done."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is now the present one
    action()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory: at present (VmRSS), or at most (VmHWM)."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
