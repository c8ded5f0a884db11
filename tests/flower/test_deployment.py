"""Real processes on the loopback: TLS, authenticated nodes, the engine's numbers, and who is refused."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fedunfold.environments import environment
from fedunfold.simulation import SimulatedFederation
from fedunfold.unfolding import Learning, learn
from fedunfold.weighting.learned import LearnedWeights

APP = Path(__file__).parents[2] / "examples" / "flower"
sys.path.insert(0, str(APP))
from deploy import KEYS, Deployment, write_node_key  # noqa: E402  (the app's folder is no package)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with ExitStack() as processes:
        found = Deployment(tmp_path, processes)
        found.start_link()
        yield found
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert not left.stdout, "processes were left running"


def test_learning_over_tls_is_the_simulated_one(deployment: Deployment) -> None:
    for key in KEYS:
        deployment.register(key)
        deployment.start_node(key)
    folder = deployment.folder / "state"
    folder.mkdir()
    deployment.run_app([f'iterations=1 rounds=2 timeout=120.0 folder="{folder}"'])
    found = LearnedWeights.load(folder / "weights.safetensors")
    env = environment("digits-label-skew").with_(rounds=2)
    expected = learn(SimulatedFederation(env), 2, learning=Learning(iterations=1))
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=0)


def test_strangers_and_nodes_without_tls_are_refused(deployment: Deployment) -> None:
    write_node_key(deployment.folder, "stranger")
    stranger = deployment.start_node("stranger")
    deployment.register("site-a")
    # Registered, but it does not know the authority that signed the SuperLink's certificate.
    doubting = deployment.start_node("site-a", "--auth-supernode-private-key", "site-a")
    plain = deployment.start_node("plain", "--insecure")
    assert stranger.wait(60) != 0
    assert doubting.wait(60) != 0
    time.sleep(3)
    log = (deployment.folder / "superlink.log").read_text()
    assert "No SuperNode found with the given public key" in log
    assert "Activated node" not in log
    assert "certificate" in (deployment.folder / "site-a.log").read_text()
    assert plain.poll() is not None or "Connection attempt failed" in (deployment.folder / "plain.log").read_text()
