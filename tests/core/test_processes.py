"""Worker processes: one thread each, deaf to Ctrl-C, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from fedunfold.core.processes import worker_pool

SCRIPT = """
import os, time
from fedunfold.core.processes import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_a_worker_has_one_thread_and_leaves_ctrl_c_to_its_parent() -> None:
    with worker_pool(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(SCRIPT, encoding="utf-8")
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Whether there is such a process that is more than an entry for its parent to collect."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
