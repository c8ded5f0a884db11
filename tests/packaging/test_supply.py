"""What is installed: the lock belongs to the constraints, and says nothing it should not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
KNOWN = (ROOT / "supply" / "torch.sha256").read_text().split()


def pins(file: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / file).read_text()))


def test_the_lock_is_of_these_constraints() -> None:
    pinned = pins("constraints.txt")
    torch = pinned.pop("torch")
    assert pins("requirements.lock") == pinned, "run `make lock`"
    assert all(name.startswith(f"torch-{torch}") for name in KNOWN[1::2]), "run `make lock`"


def test_every_release_has_hashes_and_none_names_an_index() -> None:
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins("requirements.lock"))
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
    from audit import told

    unknown: dict[str, object] = {"name": "a", "version": "1", "skip_reason": "not found"}
    clean: dict[str, object] = {"name": "b", "version": "1", "vulns": []}
    assert told([unknown, clean]) == 0
    assert "1 of 2 packages" in capsys.readouterr().out
    assert told([clean | {"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}]) == 1
    assert "b 1: CVE-1, mended in 2" in capsys.readouterr().out
