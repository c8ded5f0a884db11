"""Whether the torch that pip has just installed is a build that is known, and then the very same.

    python -m pip install --report torch.json torch && python supply/check_torch.py torch.json

A file of a known name with another hash is refused; a build nobody has listed is only named, since every platform,
index and GPU has its own.
"""

import json
import sys
from pathlib import Path

from lock import builds

KNOWN = Path(__file__).parent / "torch.sha256"


def main(report: Path) -> int:
    known = {name: sha for sha, name in (line.split() for line in KNOWN.read_text().splitlines())}
    for name, sha in builds(json.loads(report.read_text())).items():
        if name not in known:
            print(f"note: {name} is not one of the builds in {KNOWN.name}; its version is pinned, its hash is not.")
        elif known[name] != sha:
            print(f"error: {name} has the hash {sha}, and {known[name]} is expected; do not use it.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
