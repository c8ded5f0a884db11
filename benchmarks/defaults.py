"""What each method of `fedunfold benchmark` is run with where nothing is chosen for the very federation.

    python -m benchmarks defaults --out runs/defaults [--federations 96] [--processes N]

Every setting of every grid is run once on federations drawn from the distribution that rules are pre-trained on, others
than those, as the rivals of `benchmarks.rule` are. Of each method the setting with the largest mean gain over FedAvg is
written to src/fedunfold/studies/benchmark/defaults.toml, which is part of the package. Methods that learn weights for
their federation keep the literature's: a table learned for each drawn federation would take days. With all methods and
96 federations it takes about three quarters of an hour of one core, and resumes from the records in the folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomli_w

from benchmarks.rule.entrants import Entrant
from benchmarks.rule.records import Record, Records, write_text
from benchmarks.rule.runs import Job, carry_out
from benchmarks.rule.sections import SECTIONS, mean_gains
from fedunfold.core.errors import InputError
from fedunfold.studies.benchmark.contenders import Contender, contenders
from fedunfold.training.methods import Method

FILE = Path(__file__).parents[1] / "src" / "fedunfold" / "studies" / "benchmark" / "defaults.toml"
HEAD = """\
# What methods are run with where nothing is chosen for the very federation: of each grid the settings with the largest
# mean gain over FedAvg, in points, on so many federations drawn from the distribution that rules are pre-trained on.
# Made by `python -m benchmarks defaults`; methods that are missing have the literature's settings.

"""
SECTION = "tuning"
FEDAVG = Entrant("fedavg", "fedavg")


@dataclass(frozen=True)
class Candidate(Entrant):
    """A method of the benchmark with settings of its grid.

    Attributes:
        contender: The method.
        settings: Its settings.
    """

    contender: Contender = field(default_factory=Contender)
    settings: str = ""

    @property
    def setting(self) -> str:
        return self.contender.described(self.settings)

    def method(self) -> Method:
        return replace(self.contender.method(self.settings), name=self.label)


def candidates(chosen: Mapping[str, Contender]) -> list[Candidate]:
    """Every setting of every grid, but of methods that learn weights or need an environment of their own."""
    return [
        Candidate(f"{name} {settings}", contender.base, contender=contender, settings=settings)
        for name, contender in chosen.items()
        for settings in contender.grid
        if contender.method(settings).rule is not None and not contender.environment
    ]


def best(records: Sequence[Record], entered: Sequence[Candidate]) -> dict[str, dict[str, str | float | int]]:
    """Of each method the setting with the largest mean gain; of equal ones the first in the grid.

    Raises:
        InputError: There is no federation in which all of them were run.
    """
    wanted = {one.label for one in entered} | {FEDAVG.label}
    counted = [record for record in records if record.method in wanted]
    gains = mean_gains(counted, SECTIONS[SECTION].last)
    if gains.keys() != wanted:
        raise InputError("there is no federation in which every setting was run, and FedAvg did not diverge.")
    federations = len({record.environment for record in counted})
    found: dict[str, dict[str, str | float | int]] = {}
    for one in entered:
        name, gain = one.label.partition(" ")[0], round(gains[one.label], 2)
        if name not in found or gain > float(found[name]["gain"]):
            found[name] = {"default": one.settings, "gain": gain, "tuned_on": federations}
    return found


def choose_defaults(
    out: Path,
    federations: int = 96,
    processes: int = 1,
    report: Callable[[str], None] = lambda line: None,
    file: Path = FILE,
) -> None:
    """Make the runs that have no record yet, and write the file.

    Args:
        out: The folder of the records.
        federations: How many are drawn.
        processes: How many runs are made at a time.
        report: Given a line now and then on how far it is.
        file: What is written.
    """
    records, entered = Records(out), candidates(contenders())
    jobs = [
        Job(SECTION, f"{SECTION}-{number}", entrant, 0)
        for number in range(federations)
        for entrant in (FEDAVG, *entered)
    ]
    carry_out(jobs, records, processes, report)
    drawn = {f"{SECTION}-{number}" for number in range(federations)}
    found = best([record for record in records.of(SECTION) if record.environment in drawn], entered)
    write_text(file, HEAD + tomli_w.dumps(found))
