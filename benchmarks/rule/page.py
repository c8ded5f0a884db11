"""The page of the evaluation and its summary, from the records alone."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rule.drawn_tables import ablation, bad_clients, held_out
from benchmarks.rule.entrants import RULE
from benchmarks.rule.records import Record, Records, write_text
from benchmarks.rule.responses import FIGURES, FILE, draw
from benchmarks.rule.sections import GRID, SECTIONS
from benchmarks.rule.tables import dirichlet, natural, paper, tuning
from benchmarks.rule.view import Part

PARTS: dict[str, Callable[[Sequence[Record]], Part]] = {
    "paper": paper,
    "dirichlet": dirichlet,
    "natural": natural,
    "held-out": held_out,
    "bad-clients": bad_clients,
    "ablation": ablation,
    "tuning": tuning,
}
HEAD = """# A pre-trained rule beside its rivals

Made by `python -m benchmarks rule` from the records in `records`; every number and every verdict here is computed from
them. Differences are in points, the rule's minus the other's in the same trial, with 95 % intervals of Student's t.
"""
NOT_RUN = "No records yet: run the section `{}`. What data it needs is told where they are not at hand."


def write_page(out: Path) -> None:
    """Write README.md, summary.json and the figures of a folder.

    Args:
        out: The folder, with `records` in it.
    """
    records = Records(out / "records")
    text, summary = [HEAD], {}
    rules = sorted({r.setting for name in PARTS for r in records.of(name) if r.method == RULE})
    if len(rules) > 1:
        text.append(f"**Records of {len(rules)} different rules are mixed here**; run all sections again with one.\n")
    for name, part in PARTS.items():
        if not (own := records.of(name)):
            text.append(f"## {name}\n\n{NOT_RUN.format(name)}\n")
            continue
        made = part(own)
        bars = "".join(f"{bar.line}\n" for bar in made.bars)
        diverged = sum(record.final is None for record in own)
        count = f"{len(own)} of {_planned(name)} runs" + (f", of which {diverged} diverged" if diverged else "") + "."
        text.append("\n\n".join(filter(None, (f"## {made.title}", bars.strip(), made.text.strip(), count))) + "\n")
        summary[name] = {
            "runs": len(own),
            "planned": _planned(name),
            "diverged": diverged,
            "seconds": round(sum(record.seconds for record in own), 1),
            "bars": [{"text": bar.text, "holds": bar.holds} for bar in made.bars],
            "numbers": made.numbers,
        }
    if (file := out / FILE).exists():
        draw(json.loads(file.read_text(encoding="utf-8")), out)
        text.append(
            f"## What the rule decides\n\n![How the weight of a client follows its features]({FIGURES['weights']})\n\n"
            f"![How the step follows the round]({FIGURES['step']})\n"
        )
    write_text(out / "README.md", "\n".join(text))
    write_text(out / "summary.json", json.dumps({"rules": rules, "sections": _plain(summary)}, indent=1) + "\n")


def _planned(section: str) -> int:
    """How many runs a section has."""
    any_choice = dict.fromkeys(GRID, "sgd")
    return sum(1 for _ in SECTIONS[section].jobs("", any_choice))


def _plain(value: Any) -> Any:
    """The same with numbers of few digits, and None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return round(value, 4) if abs(value) < float("inf") else None
    return value
