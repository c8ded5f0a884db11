"""What went wrong with clients, counted."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fedunfold.core.errors import InputError

Given = TypeVar("Given")
Taken = TypeVar("Taken")

log = logging.getLogger("fedunfold")


@dataclass
class Faults:
    """By client key and kind, over a whole run; every one is logged when it happens."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, key: str, kind: str, detail: str) -> None:
        self.counts[key, kind] += 1
        log.warning("client %s: %s (%s)", key, kind, detail)

    def sifted(
        self,
        answers: Mapping[str, Given | str],
        asked: Iterable[str],
        about: str,
        reading: Callable[[Given, str], Taken],
        refused: dict[str, str] | None = None,
    ) -> dict[str, Taken]:
        """What can be read of the answers, in the order clients were asked in; the rest is counted.

        An answer that is a text is the reason why there is none; `reading(answer, key)` refuses by an InputError,
        whose reason goes into `refused`.
        """
        kept = {}
        for key in asked:
            answer = answers.get(key)
            if answer is None:
                self.add(key, "no answer", about)
            elif isinstance(answer, str):
                self.add(key, "failed", answer)
            else:
                try:
                    kept[key] = reading(answer, key)
                except InputError as error:
                    self.add(key, "set aside", f"{about}: {error}")
                    if refused is not None:
                        refused[key] = str(error)
        return kept

    def as_dict(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (key, kind), count in sorted(self.counts.items()):
            found.setdefault(key, {})[kind] = count
        return found
