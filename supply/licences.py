"""docs/licences.md: under which licence each locked package is, as its own metadata say, by pip-licenses."""

import json
import subprocess
import sys
from pathlib import Path

from lock import pins

ROOT = Path(__file__).parents[1]
HEAD = """# Licences of what fedunfold installs

Made by `make licences` from the metadata of the packages in `constraints.txt`, extras and development tools included.
The core install needs the few that `pyproject.toml` lists under `dependencies`, and what these need.

| package | version | licence |
|---|---|---|
"""


def main() -> int:
    names = list(pins((ROOT / "constraints.txt").read_text()))
    command = [sys.executable, "-m", "piplicenses", "--from", "mixed", "--format", "json", "--with-system"]
    made = subprocess.run([*command, "--packages", *names], check=True, capture_output=True, text=True)
    found = {entry["Name"].lower(): entry for entry in json.loads(made.stdout)}
    rows = [f"| {one['Name']} | {one['Version']} | {_short(one['License'])} |\n" for _, one in sorted(found.items())]
    if unknown := [name for name, one in found.items() if one["License"] == "UNKNOWN"]:
        print(f"note: without a licence in their metadata: {', '.join(unknown)}", file=sys.stderr)
    (ROOT / "docs" / "licences.md").write_text(HEAD + "".join(rows), encoding="utf-8")
    return 0


def _short(licence: str) -> str:
    """Some packages put the whole text there; its first line names it."""
    return licence.strip().splitlines()[0].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
