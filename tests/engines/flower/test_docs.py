"""The settings that docs/flower.md shows are those of the app; its examples run with those of all pages."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")


def test_settings_are_the_apps() -> None:
    """Every setting that a command of the page or of the app's README gives is one of the app's."""
    app = ROOT / "examples" / "flower"
    known = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    text = PAGE + (app / "README.md").read_text(encoding="utf-8")
    quoted = re.findall(r"(?:simulate\.py|deploy\.py|--run-config)[^\n']*'([^'\n…]+)'", text)
    given = [name for group in quoted for name in re.findall(r"([a-z-]+)=", group)]
    assert len(given) >= 8
    assert set(given) <= set(known)
