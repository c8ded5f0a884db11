"""Known vulnerabilities in what is locked, by pip-audit, and how many packages it got an answer for."""

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--require-hashes", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "30"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(ended.stdout)["dependencies"]
    except ValueError:  # it ends without a document where no answer comes at all
        reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"the advisory service cannot be reached from here; nothing was audited ({reason:.200}).")
        return 0
    return print_findings(packages)


def print_findings(packages: list[dict[str, object]]) -> int:
    """Print what was found; 1 where there is a vulnerability. A package without an answer does not count as audited."""
    answered = [package for package in packages if "skip_reason" not in package]
    wrong = 0
    for package in answered:
        for one in package["vulns"]:  # type: ignore[attr-defined]
            wrong += 1
            fixed = ", ".join(one["fix_versions"]) or "no version"
            print(f"{package['name']} {package['version']}: {one['id']}, fixed in {fixed}")
    print(f"{len(answered)} of {len(packages)} packages could be audited; {wrong} known vulnerabilities in them.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
