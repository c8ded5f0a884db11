"""The records of an evaluation: one for every run, in a file for each section."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedunfold.core.errors import InputError
from fedunfold.io.atomic import write_atomically

SAVE_SECONDS = 5.0
"""How much work a crash may cost."""


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        section: Where it belongs.
        environment: The federation.
        method: The label of the method.
        trial: Which trial's randomness.
        setting: What the method was run with.
        metric: What the scores are.
        greater_is_better: Its direction.
        final: After the last round; None where the run diverged. Fractions are in percent.
        mean: Over all rounds.
        scores: After every round.
        seconds: How long it took.
        warnings: What was odd.
        about: What else is known of the federation or the run.
    """

    section: str
    environment: str
    method: str
    trial: int
    setting: str
    metric: str
    greater_is_better: bool
    final: float | None
    mean: float | None
    scores: list[float]
    seconds: float
    warnings: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """It is the only one of its section with these."""
        return self.environment, self.method, self.trial

    def score(self, last: int) -> float:
        """Mean over the last rounds; of a run that diverged the worst there is."""
        if not self.scores:
            return 0.0 if self.greater_is_better else float("inf")
        rounds = self.scores[-last:]
        return sum(rounds) / len(rounds)


class Records:
    """All records of a folder.

    Args:
        folder: Holds a file for each section.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sections: dict[str, dict[tuple[str, str, int], Record]] = {}
        self._written = time.monotonic()
        self._unsaved: set[str] = set()
        for file in sorted(folder.glob("*.json")):
            self._sections[file.stem] = _read(file)

    def of(self, section: str) -> list[Record]:
        """A section's records, in an order that does not depend on when they were made."""
        return [record for _, record in sorted(self._sections.get(section, {}).items())]

    def has(self, section: str, key: tuple[str, str, int], setting: str) -> bool:
        """Whether a run was made with this setting."""
        found = self._sections.get(section, {}).get(key)
        return found is not None and found.setting == setting

    def add(self, record: Record) -> None:
        """Take a record in, and save now and then; it replaces one of the same run."""
        self._sections.setdefault(record.section, {})[record.key] = record
        self._unsaved.add(record.section)
        if time.monotonic() - self._written >= SAVE_SECONDS:
            self.save()

    def merge(self, folders: Iterable[Path]) -> None:
        """Take in records of other folders that this one lacks."""
        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"there is no folder {folder} with records; give the `records` of another evaluation.")
            for file in sorted(folder.glob("*.json")):
                mine = self._sections.setdefault(file.stem, {})
                self._sections[file.stem] = _read(file) | mine
                self._unsaved.add(file.stem)
        self.save()

    def save(self) -> None:
        """Write the sections that changed, each file whole or not at all."""
        for section in sorted(self._unsaved):
            lines = ",\n".join(json.dumps(asdict(record), ensure_ascii=False) for record in self.of(section))
            write_text(self._folder / f"{section}.json", f"[\n{lines}\n]\n")
        self._unsaved.clear()
        self._written = time.monotonic()


def _read(file: Path) -> dict[tuple[str, str, int], Record]:
    try:
        found = [Record(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} does not hold records ({error}); delete it, or restore it.") from error
    return {record.key: record for record in found}


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
