"""What is installed: the locks belong to the constraints, and say nothing it should not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements-core.lock", "requirements.lock")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
KNOWN = (ROOT / "supply" / "torch.sha256").read_text().split()


def pins(file: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / file).read_text()))


def test_the_locks_are_of_these_constraints() -> None:
    pinned = pins("constraints.txt")
    torch = pinned.pop("torch")
    core, rest = (pins(lock) for lock in LOCKS)
    assert core | rest == pinned and not core.keys() & rest.keys(), "run `make lock`"
    assert f"--requirement {LOCKS[0]}\n" in (ROOT / LOCKS[1]).read_text()
    assert all(name.startswith(f"torch-{torch}") for name in KNOWN[1::2]), "run `make lock`"


def test_the_core_is_what_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed under what its packages need, small, and without any extra's package."""
    monkeypatch.syspath_prepend(str(ROOT / "supply"))
    from lock import core

    needed = core(pins("constraints.txt"))
    assert pins(LOCKS[0]).keys() == needed - {"torch"}, "run `make lock`"
    assert {"torch", "numpy", "scikit-learn", "typer", "matplotlib", "setuptools"} <= needed
    assert not needed & {"flwr", "ray", "mlflow-skinny", "transformers", "ipykernel", "pytest"}
    assert len(needed) + 2 <= 45  # with the project and pip


@pytest.mark.parametrize("lock", LOCKS)
def test_every_release_has_hashes_and_none_names_an_index(lock: str) -> None:
    text = (ROOT / lock).read_text()
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins(lock))
    for block in blocks:
        _, *hashes = block.replace("\\", " ").split()
        assert hashes, block
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), block
    assert "://" not in text + "".join(KNOWN)


@pytest.mark.parametrize(
    ("name", "sha", "code", "said"),
    [
        (KNOWN[1], KNOWN[0], 0, ""),
        (KNOWN[1], "0" * 64, 1, "do not use it"),
        ("torch-2.13.0+cu999-cp399-none-any.whl", "0" * 64, 0, "not one of the builds"),
    ],
)
def test_a_known_build_of_torch_is_the_very_same(tmp_path: Path, name: str, sha: str, code: int, said: str) -> None:
    source = {"url": f"file:///wheels/{name.replace('+', '%2B')}", "archive_info": {"hashes": {"sha256": sha}}}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": [{"metadata": {"name": "torch"}, "download_info": source}]}))
    command = [sys.executable, str(ROOT / "supply" / "check_torch.py"), str(report)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert said in ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr == "") == (said == "")


def test_what_had_no_answer_does_not_count_as_audited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "supply"))
    from audit import print_findings

    unknown: dict[str, object] = {"name": "a", "version": "1", "skip_reason": "not found"}
    clean: dict[str, object] = {"name": "b", "version": "1", "vulns": []}
    assert print_findings([unknown, clean]) == 0
    assert "1 of 2 packages" in capsys.readouterr().out
    assert print_findings([clean | {"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]) == 1
    assert "b 1: CVE-1, fixed in 2" in capsys.readouterr().out
