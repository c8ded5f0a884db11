"""Minibatches of a round, drawn in other threads while a GPU is busy with the round before."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from fedunfold.simulation.schedule import Draw, Plan, Share, plan, sample_coefficients

Walks = Sequence[tuple[Draw, Share]]
Drawn = TypeVar("Drawn")
_Asked = tuple[Callable[[Walks], Any], Walks]


class Planner:
    """Draws what a round needs, or hands out what `look_ahead` has begun to draw; both give the same numbers.

    Shuffling leaves the interpreter to others, so that two threads take most of it off the one that feeds the GPU.
    """

    def __init__(self, batch_size: int, width: int) -> None:
        self._batch_size, self._width = batch_size, width
        self._begun: dict[_Asked, Future[Any]] = {}
        self._before: dict[_Asked, Future[Any]] = {}

    def plan(self, walks: Walks) -> Plan:
        """The minibatches of clients that train."""
        return self._drawn(self._plan, walks)

    def coefficients(self, walks: Walks) -> np.ndarray:
        """How much every sample of clients counts whose minibatches all meet the same model."""
        return self._drawn(self._coefficients, walks)

    def look_ahead(self, training: Walks, fixed: Sequence[Walks]) -> None:
        """Begin to draw what `plan` and `coefficients` will be asked for next."""
        asked: list[_Asked] = [(self._plan, tuple(training)), *((self._coefficients, tuple(walks)) for walks in fixed)]
        begun = {(draw, walks): self._threads.submit(draw, walks) for draw, walks in asked if walks}
        # The present round's coefficients may still be asked for after the next one's were begun.
        self._begun, self._before = begun, self._begun

    def _drawn(self, draw: Callable[[Walks], Drawn], walks: Walks) -> Drawn:
        asked: _Asked = draw, tuple(walks)
        begun = self._begun.get(asked) or self._before.get(asked)
        return draw(walks) if begun is None else begun.result()

    def _plan(self, walks: Walks) -> Plan:
        return plan(walks, self._batch_size, self._width)

    def _coefficients(self, walks: Walks) -> np.ndarray:
        return np.concatenate([sample_coefficients(draw, share, self._batch_size) for draw, share in walks])

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, "fedunfold-planning")
