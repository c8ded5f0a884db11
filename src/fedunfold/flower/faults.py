"""What went wrong with clients, counted."""

import logging
from collections import Counter
from dataclasses import dataclass, field

log = logging.getLogger("fedunfold")


@dataclass
class Faults:
    """By client key and kind, over a whole run; every one is logged when it happens."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, key: str, kind: str, detail: str) -> None:
        self.counts[key, kind] += 1
        log.warning("client %s: %s (%s)", key, kind, detail)

    def as_dict(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (key, kind), count in sorted(self.counts.items()):
            found.setdefault(key, {})[kind] = count
        return found
