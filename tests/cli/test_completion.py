"""What the shell is told when a user presses the tab key."""

import os
import subprocess
import sys

import pytest


def completions(typed: str) -> list[str]:
    """Candidates for the last word, as bash asks for them."""
    asked = {
        "_FEDUNFOLD_COMPLETE": "complete_bash",
        "COMP_WORDS": f"fedunfold {typed}",
        "COMP_CWORD": str(len(typed.split(" "))),
    }
    command = "import sys; sys.argv[0] = 'fedunfold'; from fedunfold.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("le", ["learn"]),
        ("learn --outer-", ["--outer-lr"]),
        ("learn mnist-r", ["mnist-rate"]),
        ("learn --adjoint e", ["exact"]),
    ],
)
def test_completions(typed: str, expected: list[str]) -> None:
    assert completions(typed) == expected
