"""Run this app on Flower's simulation: starts a SuperLink of its own on a free loopback port, and stops it again.

python examples/flower/simulate.py                       # digits, five simulated sites
python examples/flower/simulate.py 'iterations=5'        # any setting of [tool.flwr.app.config]
python examples/flower/simulate.py --nodes 200 'environment="many" method="fedavg" absent="drop"'

The last has two hundred clients, twenty of them in a round.

In the end it says how long that took and how much memory all processes had together at most (on Linux).
"""

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

APP = Path(__file__).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the SuperLink ended with code {process.returncode} before it was ready.")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"the SuperLink was not ready within {seconds:g} s.")


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process that leads a session of its own, whatever happens, and all that it started.

    Flower's programs start others, some in sessions of their own, which outlive one that was refused or killed.
    """
    try:
        yield
    finally:
        family = [handle for pid in _family(process.pid)[1:] if (handle := _handle(pid)) is not None]
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        _signal(process, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5
        for handle in family:
            if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def _signal(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(leader.pid, number)
    except ProcessLookupError:
        return  # all of them have ended


def _handle(pid: int) -> int | None:
    """A file that stands for this very process, also when its number is given to another one."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _family(pid: int) -> list[int]:
    """A process and its descendants; on systems without /proc nobody."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []  # it has just ended
    return [pid, *(id for child in children for id in _family(child))]


class Memory:
    """The most memory that this process and all it started have together, looked at twice a second.

    Pages that several processes share count once, divided among them (PSS).
    """

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            self.most = max(self.most, sum(map(_memory, _family(os.getpid()))))


def _memory(pid: int) -> int:
    """Bytes, or 0 where it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main(settings: list[str], nodes: int) -> int:
    binaries = Path(sys.executable).parent  # Flower's programs, beside the Python that runs this
    port, began = free_port(), time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | QUIET | {"FLWR_HOME": home, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
        Path(home, "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        command: list[str | Path] = [binaries / "flower-superlink", "--insecure", "--simulation"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with stopped(superlink), Memory() as memory:
            wait_for(port, superlink)
            run: list[str | Path] = [binaries / "flwr", "run", APP, "here", "--stream"]
            run += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
            run += [part for setting in settings for part in ("--run-config", setting)]
            code = subprocess.run(run, env=environment, check=False).returncode
        print(f"{time.monotonic() - began:.0f} s, at most {memory.most / 2**20:.0f} MiB in all processes")
        return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run this app on Flower's simulation.")
    parser.add_argument("settings", nargs="*", help="such as 'iterations=5'")
    parser.add_argument("--nodes", type=int, default=5, help="how many clients are simulated")
    arguments = parser.parse_args()
    raise SystemExit(main(arguments.settings, arguments.nodes))
