"""requirements.lock: every release that constraints.txt names, with the hashes of all of its files.

    python supply/lock.py

All files of a release are listed, so that the lock serves every Python and platform that the release has a file for.
torch is not in it: its builds differ by platform and index. The one that pip chooses here goes into torch.sha256.
No index is named anywhere; pip asks those it is configured for.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
HEAD = "# Made by `make lock` from constraints.txt; installed with --require-hashes --no-deps.\n"


def pins(text: str) -> dict[str, str]:
    """Names and versions of a constraints file."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def locked(wanted: dict[str, str]) -> str:
    """Every release with the SHA-256 that the index gives for each of its files, by pip-tools."""
    from piptools.repositories import PyPIRepository

    lines = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        repository = PyPIRepository([], cache_dir=folder)
        with repository.allow_all_wheels():
            for name, version in wanted.items():
                files = [one.link for one in repository.find_all_candidates(name) if str(one.version) == version]
                hashes = sorted({file.hash for file in files if file.hash and file.hash_name == "sha256"})
                if not hashes:
                    sys.exit(f"no index here has {name} {version}, or none gives hashes for it.")
                lines.append(
                    " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{sha}" for sha in hashes)]) + "\n"
                )
    return "".join(lines)


def torch_here(version: str) -> str:
    """The hash and name of the build that pip chooses here."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    said = subprocess.run([*command, "--report", "-", f"torch=={version}"], check=True, capture_output=True, text=True)
    return "".join(f"{sha}  {name}\n" for name, sha in builds(json.loads(said.stdout)).items())


def builds(report: dict[str, list[dict[str, dict[str, object]]]]) -> dict[str, str]:
    """SHA-256 of the torch in pip's installation report, by file name."""
    found = {}
    for entry in report["install"]:
        if entry["metadata"]["name"] == "torch":
            info: dict[str, dict[str, dict[str, str]]] = entry["download_info"]  # type: ignore[assignment]
            found[str(info["url"]).rpartition("/")[2].replace("%2B", "+")] = info["archive_info"]["hashes"]["sha256"]
    return found


if __name__ == "__main__":
    wanted = pins((ROOT / "constraints.txt").read_text())
    torch = wanted.pop("torch")
    lock, known = locked(wanted), HERE / "torch.sha256"
    before = known.read_text().splitlines(keepends=True) if known.exists() else []
    same_release = {line for line in before if f"torch-{torch}" in line}
    known.write_text("".join(sorted(same_release | {torch_here(torch)})))
    (ROOT / "requirements.lock").write_text(lock)
