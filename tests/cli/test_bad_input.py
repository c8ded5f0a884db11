"""Bad input: one line that names what is wrong, a non-zero exit, nothing half-written."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Command, Outcome

Federation = Callable[..., Path]


def refused(outcome: Outcome, *mentioned: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    for word in mentioned:
        assert word in outcome.err, outcome.err


def test_empty_client(fedunfold: Command, two_sites: Federation) -> None:
    env = two_sites(x_b=np.empty((0, 4), np.float32), y_b=np.empty(0, int))
    refused(fedunfold("learn", env), "b", "empty")


def test_labels_out_of_range(fedunfold: Command, two_sites: Federation) -> None:
    refused(fedunfold("run", two_sites(y_a=np.full(9, -1))), "y_a", "-1")


def test_not_a_number_in_the_data(fedunfold: Command, two_sites: Federation) -> None:
    refused(fedunfold("compare", two_sites(x_b=np.full((6, 4), np.nan))), "x_b")


@pytest.mark.parametrize("participation_probability", [-0.1, 1.5])
def test_reliability_outside_its_range(
    fedunfold: Command, two_sites: Federation, participation_probability: float
) -> None:
    refused(
        fedunfold("env", "check", two_sites(participation_probability=participation_probability)),
        "clients.1.participation_probability",
    )


def test_unknown_method_with_a_suggestion(fedunfold: Command, two_sites: Federation) -> None:
    refused(fedunfold("compare", two_sites(), "--methods", "fedavg,fednva"), "fednva", "did you mean 'fednova'?")


def test_unknown_environment_with_a_suggestion(fedunfold: Command) -> None:
    refused(fedunfold("learn", "digits-flakey"), "digits-flakey", "did you mean 'digits-flaky'?")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (("--rule", "drr"), ("unknown rule 'drr'", "did you mean 'dr'?")),
        (("--rule", "dr:p=1"), ("'p=1'", "takes q, loss")),
        (("--rule", "dr:q=-1"), ("q >= 0",)),
        (("--local", "prox:mu=x"), ("'x' in 'prox:mu=x'",)),
        (("--local", "momentum:rho=1"), ("rho",)),
        (("--server", "adam:lr=0"), ("lr",)),
        (("--aggregator", "mode"), ("aggregator 'mode'", "choose one of mean")),
        (("--aggregator", "trimmed-mean:fraction=0.5"), ("between 0 and 0.5", "0.5")),
        (("--aggregator", "krum:num_byzantine=1"), ("at least 5 clients", "2")),
        (("--device", "cuda:99"), ("cuda:99",)),
        (("--device", "mps"), ("unknown device 'mps'", "cpu or cuda")),  # it has no double precision
        (("--weights", "w.safetensors", "--rule", "dr"), ("--rule or --weights",)),
        (("--weights", "w.safetensors", "--method", "fedavg"), ("--method or --weights",)),
        (("--map",), ("--map", "--weights")),
    ],
)
def test_parts_that_cannot_be(
    fedunfold: Command, two_sites: Federation, part: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(fedunfold("run", two_sites(), *part), *words)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut off"])
def test_missing_or_truncated_data_file(fedunfold: Command, two_sites: Federation, content: bytes | None) -> None:
    env = two_sites()
    data = env.parent / "data.npz"
    data.unlink()
    if content is not None:
        data.write_bytes(content)
    refused(fedunfold("learn", env), "data.npz")


def test_data_file_cut_in_the_middle(fedunfold: Command, two_sites: Federation) -> None:
    env = two_sites()
    data = env.parent / "data.npz"
    data.write_bytes(data.read_bytes()[:400])
    refused(fedunfold("learn", env), "data.npz")


def test_missing_or_truncated_weights_file(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    weights = tmp_path / "w" / "weights.safetensors"
    refused(fedunfold("run", env, "--weights", weights), "weights.safetensors")
    fedunfold("learn", env, "--iterations", 1, "--out", tmp_path / "w")
    weights.write_bytes(weights.read_bytes()[:-40])
    refused(fedunfold("run", env, "--weights", weights), "weights.safetensors", "damaged")


def test_weights_of_another_federation(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    fedunfold("learn", env, "--iterations", 1, "--out", tmp_path / "w")
    weights = tmp_path / "w" / "weights.safetensors"
    refused(fedunfold("run", "digits-flaky", "--weights", weights), "another federation", "site-a")
    refused(
        fedunfold("run", two_sites(participation_probability=0.5), "--weights", weights), "another federation", "--map"
    )


def test_no_rounds(fedunfold: Command, two_sites: Federation) -> None:
    refused(fedunfold("learn", two_sites(), "--rounds", 0), "rounds")


@pytest.mark.parametrize("command", ["learn", "run", "compare"])
def test_divergence_names_round_and_client(fedunfold: Command, two_sites: Federation, command: str) -> None:
    refused(fedunfold(command, two_sites(lr=1e38)), "round 0", "client 'a'", "learning rate")


def test_folder_that_cannot_be_written(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites()
    (tmp_path / "file").write_text("in the way")
    for command in ("learn", "run", "compare"):
        refused(fedunfold(command, env, "--out", tmp_path / "file" / "below"), "--out")


def test_read_only_folder(fedunfold: Command, two_sites: Federation) -> None:
    env = two_sites()
    for command in ("learn", "run", "compare"):  # once, while everything may be read
        assert fedunfold(command, env, "--out", f"loaded-{command}").code == 0
    assert fedunfold("env", "show", "digits-flaky").code == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kept"
        folder.mkdir(mode=0o555)
        closed = Path(name) / "closed"
        closed.mkdir(mode=0o444)
        folder.parent.chmod(0o755)
        with nobody():
            for command in ("learn", "run", "compare"):
                refused(fedunfold(command, "digits-flaky", "--out", folder), "--out", "Permission denied")
                refused(fedunfold(command, "digits-flaky", "--out", closed / "below"), "--out", "Permission denied")
        assert not list(folder.iterdir())


@contextmanager
def nobody() -> Iterator[None]:
    """Permissions mean nothing to root, so be somebody else for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_median_cannot_be_learned_through(fedunfold: Command, two_sites: Federation) -> None:
    refused(fedunfold("compare", two_sites(), "--methods", "duw-fedavg", "--aggregator", "median"), "median")


def test_wrong_flag(fedunfold: Command) -> None:
    outcome = fedunfold("learn", "digits-flaky", "--iteration", 3)
    assert outcome.code == 2
    assert "--iterations" in outcome.err


def test_nothing_is_left_behind(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    env = two_sites(lr=1e38)
    for command in ("learn", "run", "compare"):
        fedunfold(command, env, "--out", tmp_path / "out")
        fedunfold(command, env)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "runs").iterdir())
