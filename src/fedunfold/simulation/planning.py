"""Minibatches of a round, drawn in other threads while a GPU is busy with the round before."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from fedunfold.simulation.schedule import Draw, Plan, Schedule, Share, plan, sample_coefficients

Walks = Sequence[tuple[Draw, Share]]
Drawn = TypeVar("Drawn")
_Asked = tuple[Callable[[Walks], Any], Walks]


class Planner:
    """Draws what a round needs, or hands out what `look_ahead` has begun to draw; both give the same numbers.

    Shuffling leaves the interpreter to others, so that two threads take most of it off the one that feeds the GPU.
    """

    def __init__(self, batch_size: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self._batch_size, self._width, self._place = batch_size, width, (device, dtype)
        self._uploaded: tuple[Walks, Schedule] | None = None
        self._begun: dict[_Asked, Future[Any]] = {}
        self._before: dict[_Asked, Future[Any]] = {}

    def schedule(self, walks: Walks) -> Schedule:
        """The minibatches of clients that train, on the device."""
        if self._uploaded is not None and self._uploaded[0] == tuple(walks):
            return self._uploaded[1]
        return self._drawn(self._plan, walks).on(*self._place)

    def coefficients(self, walks: Walks) -> np.ndarray:
        """How much every sample of clients counts whose minibatches all meet the same model."""
        return self._drawn(self._coefficients, walks)

    def look_ahead(self, training: Walks, fixed: Sequence[Walks]) -> None:
        """Begin to draw what `schedule` and `coefficients` will be asked for next."""
        asked: list[_Asked] = [(self._plan, tuple(training)), *((self._coefficients, tuple(walks)) for walks in fixed)]
        begun = {(draw, walks): self._threads.submit(draw, walks) for draw, walks in asked if walks}
        # The present round's coefficients may still be asked for after the next one's were begun.
        self._begun, self._before = begun, self._begun

    def upload(self) -> None:
        """Copy the plan that was begun to the device, behind what that is busy with."""
        for (draw, walks), begun in self._begun.items():
            if draw == self._plan:
                self._uploaded = walks, begun.result().on(*self._place)

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
