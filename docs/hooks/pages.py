"""What the site adds to the pages when it is built: the commands, pages without a place, links out of docs/."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from commands import command_pages  # noqa: E402
from numbers_of_runs import filled  # noqa: E402

OUTSIDE = re.compile(r"\[`?([^\]`]+)`?\]\((?:\.\./)+((?:examples|benchmarks|src|tests)/[^)]*)\)")
"""A link to a file of the repository that is no page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page that the nav does not name yet goes under How-to, so that none is out of reach."""
    nav: list[Any] = config["nav"]
    named = set(re.findall(r"[\w./-]+\.md", str(nav)))
    forgotten = sorted(path.name for path in Path(config["docs_dir"]).glob("*.md") if path.name not in named)
    next(entry["How-to"] for entry in nav if "How-to" in entry).extend(forgotten)
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links out of docs/ become paths in the repository; tables of results are those of the records. In a checkout the
    page of the commands says where else they are."""
    if page.file.src_uri == "reference/commands.md":
        return command_pages()
    return filled(OUTSIDE.sub(r"`\2`", markdown))
