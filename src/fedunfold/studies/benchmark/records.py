"""The records of a benchmark: a file for every run, written whole, under a name that says what it is."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedunfold.core.errors import InputError
from fedunfold.core.task import PrimaryMetric
from fedunfold.io.checkpoint import DamagedError, first_difference, read_record, write_record

TRIAL, TUNING = "trial", "tuning"
"""What the runs are called that methods are judged by, and those that settings are chosen by."""
SUITE = "suite.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """One run. Fractions are in percent.

    Attributes:
        environment: Where.
        method: Which method.
        settings: With which settings.
        described: What that was, with the rule's fingerprint: a record of another description is made again.
        run: Its name: `trial-0`, or `tuning-0` where it was tested on validation rows.
        metric: What the scores are.
        scores: After every round; none where the run diverged.
        judged: By the metric that settings are chosen by, after the last round, so that greater is better; None where
            it is not known.
        participations: How many clients took part, in every round.
        vectors: How many vectors of the model's size each of these received and sent.
        parameters: How many numbers the model has.
        clients: Mean, standard deviation and mean of the worst tenth of the final model's scores on the clients' own
            training data.
        learning: Rounds and megabytes that learning the weights took before, where weights were learned.
        ended: Why there are no scores: the run diverged, or the method cannot be run here.
        refused: Whether it is the second.
        warnings: What was odd.
        seconds: How long it took; with the learning, where this run waited for it.
    """

    environment: str
    method: str
    settings: str
    described: str
    run: str
    metric: PrimaryMetric
    scores: list[float] = field(default_factory=list)
    judged: float | None = None
    participations: list[int] = field(default_factory=list)
    vectors: int = 2
    parameters: int = 0
    clients: Mapping[str, float] = field(default_factory=dict)
    learning: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""
    refused: bool = False
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def diverged(self) -> bool:
        return not self.scores and not self.refused

    @property
    def final(self) -> float | None:
        """The score after the last round; None where there is none."""
        return self.scores[-1] if self.scores else None

    @property
    def validated(self) -> float:
        """What its settings are judged by; of a run that diverged the least there is."""
        return -math.inf if self.judged is None else self.judged


_VALIDATED = TypeAdapter(RunRecord)


@dataclass(frozen=True)
class RunRecords:
    """The records of a suite.

    Attributes:
        folder: Has a folder for every environment, in it one for every method, and in that one for each settings.
    """

    folder: Path

    @property
    def begun(self) -> bool:
        """Whether there may be records to resume from."""
        return (self.folder / SUITE).exists()

    def find(self, environment: str, method: str, settings: str, run: str, described: str) -> RunRecord | None:
        """A run's record, where there is one that is whole and of the same description."""
        found = self._read(self.place(environment, method, settings) / f"{run}.json")
        return found if found is not None and found.described == described else None

    def save(self, record: RunRecord) -> None:
        """Write a record, in the place of one of the same run."""
        file = self.place(record.environment, record.method, record.settings) / f"{record.run}.json"
        write_record(file, {**asdict(record), "metric": record.metric.describe()})

    def place(self, environment: str, method: str, settings: str) -> Path:
        """The folder of a method's runs with these settings; its name can be a file's on every system."""
        name = re.sub(r"[^\w.=,+-]", "_", settings) or "as-it-is"
        name = name if len(name) <= 100 else f"{name[:80]}-{sha256(settings.encode()).hexdigest()[:12]}"
        return self.folder / environment / method / name

    def begin(self, suite: Mapping[str, Any], same: Mapping[str, Mapping[str, Any]]) -> None:
        """Say what the records belong to, and refuse to mix in others.

        Args:
            suite: What the page has to know of the suite.
            same: What may not change, by environment: its data, how clients train, on what it is computed.

        Raises:
            InputError: The folder holds records of other data, clients or devices.
        """
        for environment, ours in same.items():
            file = self.folder / environment / "environment.json"
            if not file.exists():
                write_record(file, ours)
            elif difference := first_difference(read_record(file, set(ours)), dict(ours)):
                raise InputError(
                    f"{file.parent} holds records of other data, clients or devices ({difference}); choose another "
                    "`out`, or delete that folder."
                )
        before = self.suite() if self.begun else {"methods": {}, "environments": {}}
        methods = {**before["methods"], **suite["methods"]}  # a part of the suite leaves the others as they were
        environments = {name: {**about} for name, about in suite["environments"].items()}
        for name, about in environments.items():
            about.setdefault("left_out", before["environments"].get(name, {}).get("left_out", ""))
        write_record(self.folder / SUITE, {**suite, "methods": methods, "environments": environments})

    def suite(self) -> dict[str, Any]:
        """What `begin` was told of the suite.

        Raises:
            InputError: There are no records.
        """
        if not self.begun:
            raise InputError(f"{self.folder} holds no records; run the benchmark first.")
        return read_record(self.folder / SUITE, {"name", "environments", "methods"})

    def _read(self, file: Path) -> RunRecord | None:
        """None where there is no such record, or a damaged one, which is deleted: it is made again."""
        if not file.exists():
            return None
        names = {one.name for one in fields(RunRecord)}
        try:
            found = read_record(file, names)
            return _VALIDATED.validate_python({name: found[name] for name in names})
        except (DamagedError, ValidationError):
            log.warning("record %s is damaged; it is made again.", file)
            file.unlink()
            return None
