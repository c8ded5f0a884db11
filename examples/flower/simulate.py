"""Run this app on Flower's simulation: starts a SuperLink of its own on a free loopback port, and stops it again.

python examples/flower/simulate.py                       # digits, five simulated sites
python examples/flower/simulate.py 'iterations=5'        # any setting of [tool.flwr.app.config]
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

APP = Path(__file__).parent
SITES = 5
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


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
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
    """End a process that leads a session of its own, whatever happens, and what it started with it.

    Flower's programs start others, which outlive one that was refused or killed.
    """
    try:
        yield
    finally:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(leader.pid, number)
    except ProcessLookupError:
        return  # all of them have ended


def main(settings: list[str]) -> int:
    binaries = Path(sys.executable).parent  # Flower's programs, beside the Python that runs this
    port = free_port()
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
        with stopped(superlink):
            wait_for(port, superlink)
            run: list[str | Path] = [binaries / "flwr", "run", APP, "here", "--stream"]
            run += ["--federation-config", f"num-supernodes={SITES}"]
            run += [part for setting in settings for part in ("--run-config", setting)]
            return subprocess.run(run, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
