"""Known vulnerabilities in what is locked, by pip-audit; goes on with a word where the advisories cannot be had."""

import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
UNREACHABLE = ("ConnectionError", "ServiceError", "ProxyError", "Timeout", "Max retries", "Could not connect")


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--require-hashes", "--disable-pip"]
    ended = subprocess.run(
        [*command, "--progress-spinner", "off", "--timeout", "30"], capture_output=True, text=True, check=False
    )
    if ended.returncode and any(sign in ended.stderr for sign in UNREACHABLE):
        print("the advisory service cannot be reached from here; nothing was audited.")
        return 0
    print(ended.stdout + ended.stderr, end="")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
