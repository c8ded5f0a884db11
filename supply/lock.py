"""requirements-core.lock and requirements.lock: every release of constraints.txt, with the hashes of all of its files.

    python supply/lock.py

The core is what `pyproject.toml` lists under `dependencies` and for the build, and what these need; requirements.lock
includes it and adds the rest. All files of a release are listed, so that the locks serve every Python and platform that
the release has a file for. torch is in neither: its builds differ by platform and index. The one that pip chooses here
goes into torch.sha256. No index is named anywhere; pip uses those it is configured for.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
ROOT = HERE.parent
CORE, ALL = "requirements-core.lock", "requirements.lock"
HEAD = "# Made by `make lock` from constraints.txt; installed with --require-hashes --no-deps.\n"


def pins(text: str) -> dict[str, str]:
    """Names and versions of a constraints file."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def core(wanted: Mapping[str, str]) -> set[str]:
    """The names that a core install needs on any platform, by the metadata of what is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = {canonicalize_name(name): name for name in wanted}
    found: set[str] = set()
    todo = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    while todo:
        requirement = Requirement(todo.pop())
        name = known.get(canonicalize_name(requirement.name))
        if name is not None and name not in found and "extra" not in str(requirement.marker):
            found.add(name)
            todo += metadata.requires(name) or []
    return found


def releases(wanted: Mapping[str, str]) -> dict[str, str]:
    """Every release with the SHA-256 that the index gives for each of its files, by pip-tools."""
    from piptools.repositories import PyPIRepository

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        repository = PyPIRepository([], cache_dir=folder)
        with repository.allow_all_wheels():
            for name, version in wanted.items():
                files = [one.link for one in repository.find_all_candidates(name) if str(one.version) == version]
                hashes = sorted({file.hash for file in files if file.hash and file.hash_name == "sha256"})
                if not hashes:
                    sys.exit(f"no index here has {name} {version}, or none gives hashes for it.")
                lines = [f"{name}=={version}", *(f"    --hash=sha256:{sha}" for sha in hashes)]
                found[name] = " \\\n".join(lines) + "\n"
    return found


def write(found: Mapping[str, str], needed: set[str]) -> None:
    """The two locks."""
    (ROOT / CORE).write_text(HEAD + "".join(text for name, text in found.items() if name in needed))
    rest = "".join(text for name, text in found.items() if name not in needed)
    (ROOT / ALL).write_text(f"{HEAD}--requirement {CORE}\n{rest}")


def torch_here(version: str) -> str:
    """The hash and name of the build that pip chooses here."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    made = subprocess.run([*command, "--report", "-", f"torch=={version}"], check=True, capture_output=True, text=True)
    return "".join(f"{sha}  {name}\n" for name, sha in builds(json.loads(made.stdout)).items())


def builds(report: dict[str, list[dict[str, dict[str, object]]]]) -> dict[str, str]:
    """SHA-256 of the torch in pip's installation report, by file name."""
    found = {}
    for entry in report["install"]:
        if entry["metadata"]["name"] == "torch":
            info: dict[str, dict[str, dict[str, str]]] = entry["download_info"]  # type: ignore[assignment]
            found[str(info["url"]).rpartition("/")[2].replace("%2B", "+")] = info["archive_info"]["hashes"]["sha256"]
    return found


def main() -> None:
    wanted = pins((ROOT / "constraints.txt").read_text())
    needed = core(wanted)
    torch = wanted.pop("torch")
    found, known = releases(wanted), HERE / "torch.sha256"
    before = known.read_text().splitlines(keepends=True) if known.exists() else []
    same_release = {line for line in before if f"torch-{torch}" in line}
    known.write_text("".join(sorted(same_release | {torch_here(torch)})))
    write(found, needed)


if __name__ == "__main__":
    main()
