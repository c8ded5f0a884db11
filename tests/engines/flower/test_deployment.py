"""Real processes on the loopback: TLS, authenticated nodes, the engine's numbers, and what is killed or refused."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.rules.learned import LearnedWeights
from fedunfold.unfolding import Learning, learn
from tests.support import warm_start
from tests.support.everything import ENV, TOLERANCE, assert_same, everything

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples" / "flower"))
from deploy import CLIENT_IDS, Deployment, write_node_key  # noqa: E402  (the app's folder is no package)
from simulate import APP  # noqa: E402

pytestmark = [pytest.mark.network, pytest.mark.slow]
SETTINGS = (
    f'clients="{" ".join(CLIENT_IDS)}" task="classification:classes=10" hidden="32" epochs=2 batch-size=10 lr=0.05'
)
"""The digits again, this time as the clients' own data."""


REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "deployment"], standalone_mode=False)
"""


class QuickDeployment(Deployment):
    """One whose clients need not load torch for every message, and whose killed nodes are missed sooner."""

    def __init__(self, folder: Path, processes: ExitStack) -> None:
        super().__init__(folder, processes)
        socket = warm_start.install(folder / "warm")
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.environment |= {
            "PATH": f"{socket.parent}{os.pathsep}{self.environment['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        }
        self.start("warm", sys.executable, "-m", "tests.support.warm_start", str(socket))

    def register_all(self, names: Iterable[str]) -> None:
        """By Flower's own command, in one process for all of them."""
        for name in names:
            write_node_key(self.folder, name)
        keys = [str(self.folder / f"{name}.pub") for name in names]
        subprocess.run([sys.executable, "-c", REGISTER, *keys], env=self.environment, check=True)

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        if program == "flower-supernode":
            return super().start(name, sys.executable, "-m", "tests.support.quick_supernode", *arguments)
        return super().start(name, program, *arguments)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink, and a node for every client of the digits, with its samples in a file of its own."""
    folder = tmp_path_factory.mktemp("deployment")
    with ExitStack() as processes:
        found = QuickDeployment(folder, processes)
        found.start_link()
        found.register_all(CLIENT_IDS)
        data = ENV.load()
        np.savez(folder / "test.npz", x=data.x_test.numpy(), y=data.y_test.numpy())
        for k, key in enumerate(CLIENT_IDS):
            x, y = data.client(k)
            np.savez(folder / f"{key}.npz", x=x.numpy(), y=y.numpy())
            found.start_node(key, data=folder / f"{key}.npz")
        until(lambda: (folder / "superlink.log").read_text().count("Activated node") >= len(CLIENT_IDS), 120)
        yield found
    until(lambda: not running(folder), 10)


def running(folder: Path) -> dict[int, str]:
    """Command lines of all processes of a deployment, by id: they have its folder in their environment."""
    mark, found = f"FLWR_HOME={folder}\0".encode(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended, or is somebody else's
    return found


def until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.05)


def entries(file: Path, name: str) -> int:
    """How many entries an array of a checkpoint has; 0 before there is one."""
    if not file.exists():
        return 0
    with safe_open(file, framework="pt") as opened:
        return len(opened.get_tensor(name))


def begin(deployment: Deployment, settings: str) -> subprocess.Popen[bytes]:
    """A run that the test continues beside."""
    return deployment.start("run", "flwr", "run", str(APP), "deployment", "--stream", "--run-config", settings)


def next_round(deployment: Deployment) -> None:
    """Wait until every node has received one more message."""

    def received() -> list[int]:
        return [(deployment.folder / f"{key}.log").read_text().count("Received successfully") for key in CLIENT_IDS]

    before = received()
    until(lambda: all(now > then for now, then in zip(received(), before, strict=True)), 60)


def kill(deployment: Deployment, *parts: str) -> None:
    """SIGKILL the one process of the deployment that has each of these in its command line, in this order.

    Each is waited for: until the kernel has closed what it held open, its port still answers.
    """
    for part in parts:
        (found,) = matching(deployment, part)
        handle = os.pidfd_open(found)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        gone, _, _ = select.select([handle], [], [], 10)
        os.close(handle)
        assert gone, f"{part} still runs"


def matching(deployment: Deployment, part: str) -> list[int]:
    return [id for id, command in running(deployment.folder).items() if part in command]


def started_again(deployment: Deployment, key: str) -> None:
    """As a service manager does: a SuperLink refuses a node that it still takes for running, and the node ends."""
    log = deployment.folder / f"{key}.log"
    before = log.read_text().count("SuperNode ID:")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        deployment.start_node(key, data=deployment.folder / f"{key}.npz")
        until(lambda: deployment.nodes[key].poll() is not None or log.read_text().count("SuperNode ID:") > before, 30)
        if deployment.nodes[key].poll() is None:
            return
        time.sleep(3)
    raise AssertionError(f"the node of {key} could not be started again")


def test_everything_over_tls_is_the_engines(deployment: Deployment, tmp_path: Path) -> None:
    """In both precisions at once, which saves much waiting."""

    def over_tls(precision: str) -> None:
        settings = f'precision="{precision}" file="{tmp_path / precision}"'
        deployment.run_app([settings], Path(__file__).parent / "equality_app")

    with ThreadPoolExecutor() as both:
        list(both.map(over_tls, TOLERANCE))
    for precision in TOLERANCE:
        expected = everything(SimulatedFederation(ENV, dtype=getattr(torch, precision)))
        assert_same(json.loads((tmp_path / precision).read_text()), expected, precision)


def test_a_node_killed_in_a_round_is_absent_and_comes_back(deployment: Deployment, tmp_path: Path) -> None:
    victim = deployment.nodes["site-b"]
    test = deployment.folder / "test.npz"
    settings = f'{SETTINGS} method="fedavg" rounds=9 timeout=20.0 test="{test}" folder="{tmp_path}"'
    run = begin(deployment, settings)
    state, log = tmp_path / "size-run.safetensors", deployment.folder / "site-b.log"
    until(lambda: entries(state, "0.weights") >= 1, 120)
    sent = log.read_text().count("Receiving: train")
    until(lambda: log.read_text().count("Receiving: train") > sent, 60)
    os.killpg(victim.pid, signal.SIGKILL)
    started_again(deployment, "site-b")
    assert run.wait(300) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    participated = [row[CLIENT_IDS.index("site-b")] for row in report["runs"]["size"]["participated"]]
    assert participated[0] == participated[-1] == 1
    assert 0 in participated
    assert set(report["failures"]) == {"site-b"}
    assert sum(report["failures"]["site-b"].values()) == participated.count(0)
    assert report["runs"]["size"]["accuracy"] > 0.5


def test_a_killed_server_resumes_to_the_same_weights(deployment: Deployment, tmp_path: Path) -> None:
    """The ServerApp is killed in the second step of the learning, all there is of the server in the third."""
    settings = f'{SETTINGS} precision="float64" iterations=3 rounds=1 timeout=30.0 folder="{tmp_path}"'
    state = tmp_path / "learning.safetensors"
    run = begin(deployment, settings)
    until(lambda: entries(state, "losses") == 1, 120)
    next_round(deployment)
    kill(deployment, "flwr-serverapp")
    run.kill()
    run = begin(deployment, settings)
    until(lambda: entries(state, "losses") == 2, 240)
    next_round(deployment)
    kill(deployment, "flower-superlink", f"--parent-pid {deployment.link.pid} ", "flwr-serverapp")
    run.kill()
    assert entries(state, "losses") == 2
    deployment.start_link()
    deployment.run_app([settings])
    found = LearnedWeights.load(tmp_path / "weights.safetensors")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tested_on"] == "the clients' own training data"
    learning = Learning(iterations=3)
    expected = learn(SimulatedFederation(ENV.replace(rounds=1), dtype=torch.float64), 1, learning=learning)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=0)


def test_strangers_and_nodes_without_tls_are_refused(deployment: Deployment) -> None:
    file = deployment.folder / "superlink.log"
    before = len(file.read_text())
    write_node_key(deployment.folder, "stranger")
    stranger = deployment.start_node("stranger")
    deployment.register("site-f")
    # Registered, but it does not know the authority that signed the SuperLink's certificate.
    doubting = deployment.start_node("site-f", "--auth-supernode-private-key", "site-f")
    plain = deployment.start_node("plain", "--insecure")
    assert stranger.wait(60) != 0
    assert doubting.wait(60) != 0
    plain_log = deployment.folder / "plain.log"
    until(lambda: plain.poll() is not None or "Connection attempt failed" in plain_log.read_text(), 60)
    log = file.read_text()[before:]
    assert "No SuperNode found with the given public key" in log
    assert "Activated node" not in log
    assert "certificate" in (deployment.folder / "site-f.log").read_text()
