"""`fedunfold theory` on the folders that other commands leave."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused

Federation = Callable[..., Path]
CONSTANTS = ("--L", 0.5, "--sigma", 1, "--G", 3, "--kappa", 0.5, "--beta", 1, "--gap", 2.3)


@pytest.fixture
def run(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> Path:
    """Weights for clients of 9 and 6 samples in minibatches of 4, with 1 and 2 epochs: 3 and 4 steps."""
    fedunfold("learn", two_sites(), "--iterations", 2, "--out", tmp_path)
    return tmp_path


def test_table(fedunfold: Command, run: Path) -> None:
    shown = fedunfold("theory", run, *CONSTANTS)
    assert shown.code == 0, shown.err
    for word in (
        "variance V_k",
        "1/√T",
        "τ_eff",
        "as published",
        "D <= 1/(4β² + 1)",
        "varying weights",
        "sum",
    ):
        assert word in shown.out
    assert "–" not in [cell.strip() for cell in shown.out.split("│")]
    assert "--recast" in shown.out


def test_json(fedunfold: Command, run: Path) -> None:
    seen = fedunfold("theory", run, *CONSTANTS, "--format", "json").json
    assert seen["environment"] == "two-sites"
    assert seen["weights"] == "weights.safetensors"
    assert seen["keys"] == ["a", "b"]
    assert seen["mean_steps"] == 3.5
    assert seen["effective_steps"] == pytest.approx([(9 * 3 + 6 * 4) / 15] * 3)
    assert seen["bound"]["start"] == pytest.approx(4 * 2.3 / (3 * 3.4 * 0.1))
    assert seen["bound"]["total"] >= seen["published_bound"]["total"]
    assert [condition["holds"] for condition in seen["conditions"]] == [True] * 4 + [False]
    assert len(seen["notes"]) == 1


def test_a_step_size_too_large_for_the_derivation(fedunfold: Command, run: Path) -> None:
    shown = fedunfold("theory", run, "--L", 2, "--beta", 1).out
    assert "not established for this run: it is without max_t τ_eff η L <= 1/2, D <= 1/(4β² + 1)." in shown


def test_recast(fedunfold: Command, run: Path) -> None:
    plain = fedunfold("theory", run, "--format", "json").json
    recast = fedunfold("theory", run, "--recast", "--format", "json").json
    assert recast["recast"]
    assert recast["conditions"][-1]["holds"]
    a, b = plain["objective"]
    assert recast["objective"][0] == pytest.approx(3 * a / (3 * a + 4 * b), abs=0.005)


def test_without_constants_terms_are_left_out_and_named(fedunfold: Command, run: Path) -> None:
    seen = fedunfold("theory", run, "--L", 1, "--format", "json").json
    assert set(seen["bound"].values()) == {None}
    assert seen["a_tilde"] > 0
    assert seen["d"] == pytest.approx(4 * 0.1**2 * 4 * 3)
    assert "--sigma, --G, --kappa, --beta, --gap" in seen["notes"][-1]


def test_where_the_run_leaves_the_theorem(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    fedunfold(
        *("learn", two_sites(participation_probability=0.5), "--iterations", 1, "--out", tmp_path),
        *("--local", "nova", "--server", "adam:lr=0.05"),
    )
    notes = fedunfold("theory", tmp_path, *CONSTANTS, "--format", "json").json["notes"]
    assert ["absent" in notes[0], "adam" in notes[1], len(notes)] == [True, True, 2]


def test_one_of_a_comparison(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    fedunfold(
        *("compare", two_sites(), "--methods", "duw-fedavg,duw-fednova", "--trials", 1),
        *("--iterations", 1, "--out", tmp_path),
    )
    refused(fedunfold("theory", tmp_path), "--weights", "duw-fedavg, duw-fednova")
    refused(fedunfold("theory", tmp_path, "--weights", "duw-fednva"), "did you mean 'duw-fednova'?")
    for name in ("duw-fednova", "duw-fednova.safetensors"):
        seen = fedunfold("theory", tmp_path, "--weights", name, "--format", "json").json
        assert seen["weights"] == "duw-fednova.safetensors"
        assert seen["conditions"][-1]["holds"]


def test_not_a_run(fedunfold: Command, two_sites: Federation, tmp_path: Path) -> None:
    refused(fedunfold("theory", tmp_path / "nowhere"), "nowhere", "no folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(fedunfold("theory", empty), "empty", "settings.json")
    fedunfold("run", two_sites(), "--out", tmp_path / "ran")
    refused(fedunfold("theory", tmp_path / "ran"), "ran", "no learned weights")


def test_damaged_run(fedunfold: Command, run: Path) -> None:
    weights = run / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    refused(fedunfold("theory", run), "weights.safetensors", "damaged")
    weights.write_bytes(content)
    (run / "environment.toml").unlink()
    refused(fedunfold("theory", run), "environment.toml", "--env")
    assert fedunfold("theory", run, "--env", run / "mine.toml").code == 0
    refused(fedunfold("theory", run, "--env", "digits-flaky"), "another federation")


def test_impossible_constant(fedunfold: Command, run: Path) -> None:
    refused(fedunfold("theory", run, "--beta", 0.5), "beta", ">= 1")
