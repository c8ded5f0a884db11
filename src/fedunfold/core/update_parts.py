"""Updates that are read a part at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

PART = 2**18
"""About how many numbers a part has, of all updates together: 1 MB in single precision, which a processor's cache
holds."""


class InParts(ABC):
    """Updates that are somewhere else already, so that a stack of them would be a copy too many."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """All of them a part at a time: where it begins, and its entries [n, ≤ d]; the next part may overwrite them."""
