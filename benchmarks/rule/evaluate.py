"""The evaluation from its beginning to its page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rule.entrants import load_rule
from benchmarks.rule.federations import unavailable
from benchmarks.rule.page import write_page
from benchmarks.rule.records import Records
from benchmarks.rule.responses import save_responses
from benchmarks.rule.runs import carry_out
from benchmarks.rule.sections import SECTIONS, USE_CHOICE, choice
from fedunfold.core.errors import InputError


@dataclass(frozen=True)
class Amounts:
    """How much is run, where it is less than all.

    Attributes:
        trials: Trials of every federation.
        federations: Federations of each section whose federations are drawn by number.
    """

    trials: int | None = None
    federations: int | None = None


def evaluate(
    rule: str,
    out: Path,
    only: Sequence[str] = (),
    processes: int = 1,
    amounts: Amounts | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Make the runs that have no record yet, section after section, and write the page.

    Args:
        rule: The rule's file or name.
        out: The page's folder; records are in `records` there.
        only: The sections; all of them without any.
        processes: How many runs are made at a time.
        amounts: How much is run, where it is less than all.
        report: Given a line now and then on how far it is.

    Raises:
        InputError: A section is unknown, the rule cannot be read, or settings are not chosen yet.
    """
    if unknown := [name for name in only if name not in SECTIONS]:
        raise InputError(f"there is no section '{unknown[0]}'; choose among {', '.join(SECTIONS)}.")
    loaded, algorithm = load_rule(rule)
    records, amounts = Records(out / "records"), amounts or Amounts()
    for section in SECTIONS.values():
        if only and section.name not in only:
            continue
        smaller = section.smaller(amounts.trials, amounts.federations)
        chosen = choice(records.of("tuning")) if section.name in USE_CHOICE else {}
        missing = {environment: unavailable(section.name, environment) for environment in smaller.environments}
        for reason in sorted(set(missing.values()) - {""}):
            report(f"{section.name}: left out: {reason}")
        jobs = [job for job in smaller.jobs(rule, chosen) if not missing[job.environment]]
        carry_out(jobs, records, processes, report)
    save_responses(loaded, algorithm, records.of("ablation"), out)
    write_page(out)
