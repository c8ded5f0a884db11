"""The page: what is shown where, in one HTML file that needs nothing else."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fedunfold.core.extras import import_extra
from fedunfold.report.grouping import group_runs
from fedunfold.report.insights import Ranked, ranked
from fedunfold.report.panels import cards_of
from fedunfold.report.tables import client_table, facts, outcome_table, settings_table
from fedunfold.report.text import capital
from fedunfold.report.verdict import Verdict, verdict
from fedunfold.runs.labels import distinct
from fedunfold.runs.schema import RunRecord
from fedunfold.version import VERSION

ROBUST = re.compile(r"\b(median|trimmed|krum)\b")  # as a method's name says that it is not the mean


@dataclass(frozen=True)
class Summary:
    """What the page says in sentences of one federation.

    Attributes:
        verdict: Which method to use; None where no federated one has a score.
        findings: What else the records show.
    """

    verdict: Verdict | None
    findings: Ranked


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        html: The file's content.
        summaries: The sentences in it, by the federation they are about.
    """

    html: str
    summaries: dict[str, Summary]


def require_extra() -> tuple[Any, Any]:
    """Import jinja2 and plotly.offline.

    Raises:
        InputError: One of them is not installed.
    """
    otherwise = "the report needs plotly and jinja2: pip install 'fedunfold[report]'."
    return import_extra("jinja2", otherwise), import_extra("plotly.offline", otherwise)


def build(runs: Sequence[RunRecord]) -> Page:
    """One page for some runs.

    Args:
        runs: Of one federation or of several.

    Raises:
        InputError: What it needs is not installed.
    """
    jinja2, offline = require_extra()
    groups = group_runs(runs)
    names = distinct([group.first.environment for group in groups])
    shown = names if len(groups) > 1 else [""]
    found = {name: Summary(verdict(group), ranked(group)) for name, group in zip(names, groups, strict=True)}
    cards = cards_of(shown, groups)
    drawings = {
        f"{section}-{i}": [drawing.as_json() for drawing in card.drawings]
        for section, shown_there in cards.items()
        for i, card in enumerate(shown_there)
    }
    scripts = {"theme": _part("theme.js"), "plotly": offline.get_plotlyjs(), "page": _part("page.js")}
    # Whatever a folder holds is text: it is escaped on its way into the page.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    html = environment.from_string(_part("page.html")).render(
        title=", ".join(names),
        runs=runs,
        several=len(runs) > 1,
        summaries=list(zip(shown, found.values(), strict=True)),
        untested=[run.label if len(runs) > 1 else "" for run in runs if not (run.methods or run.left_out)],
        outcomes=outcome_table(groups),
        federations=[
            (name, group.first.federation, client_table(group)) for name, group in zip(shown, groups, strict=True)
        ],
        facts=facts,
        cards=cards,
        robust=any(ROBUST.search(method.name) for run in runs for method in run.methods),
        score=capital(
            groups[0].first.primary.label if len({group.first.primary for group in groups}) == 1 else "score"
        ),
        settings=[(run, settings_table(run)) for run in runs],
        version=VERSION,
        style=_part("page.css"),
        scripts=scripts,
        hashes=" ".join(f"'sha256-{_sha256(code)}'" for code in scripts.values()),
        # Cannot end the script element it stands in.
        drawings=jinja2.utils.htmlsafe_json_dumps(drawings, allow_nan=False, separators=(",", ":")),
    )
    return Page(html, found)


def _part(name: str) -> str:
    return (resources.files("fedunfold.report") / "template" / name).read_text(encoding="utf-8")


def _sha256(code: str) -> str:
    """As the page's security policy names a script: no other one runs, wherever it may come from."""
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
