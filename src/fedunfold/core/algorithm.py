"""How a federation is trained, apart from how its clients are weighted."""

import math
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import InputError
from fedunfold.core.messages import AbsentLoss, TrainRequest
from fedunfold.core.own_layers import OwnLayers, own_places
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import (
    AGGREGATORS,
    LOCAL_OPTIMIZERS,
    SERVER_OPTIMIZERS,
    Aggregator,
    LocalOptimizer,
    Part,
    ServerOptimizer,
)

Absent = Literal["keep", "drop", "remember"]
UpdateFilter = Literal["finite", "norm"]
Schedule = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True)
class Algorithm:
    """How clients train, what the server does with their updates, and with absent clients and bad updates.

    Attributes:
        local: The clients' optimiser (`local`).
        server: The server's optimiser (`server`).
        absent: What becomes of sampled clients that could not be reached: keep, drop or remember
            (`aggregation.absent`).
        absent_loss: Whether these still report a loss at w^(t): evaluate (possible in a simulation) or skip.
        step_sizes: s_t, which scale a round's direction, u = s_t Σ_k α_k m_k; rounds beyond them repeat the last, and
            without any s_t = 1.
        filter: Which updates are rejected: finite or norm (`aggregation.screening`).
        aggregator: How the others become one direction (`aggregation.robust`).
        own_layers: Which layers stay with the clients: none, normalization (FedBN) or last (FedPer)
            (`core.own_layers`).
        schedule: Whether the server waits for all clients of a round (synchronous), or makes a step as soon as some
            updates have arrived, whatever model they were trained from (asynchronous: `core.timetable`).

    >>> import fedunfold as fu
    >>> Algorithm(fu.prox(mu=0.1), fu.adam(lr=0.02), absent="drop").local.mu
    0.1
    """

    local: LocalOptimizer = field(default_factory=partial(LOCAL_OPTIMIZERS.make, "sgd"))
    server: ServerOptimizer = field(default_factory=partial(SERVER_OPTIMIZERS.make, "sgd"))
    absent: Absent = "keep"
    absent_loss: AbsentLoss = "evaluate"
    step_sizes: tuple[float, ...] = ()
    filter: UpdateFilter = "finite"
    aggregator: Aggregator = field(default_factory=partial(AGGREGATORS.make, "mean"))
    own_layers: OwnLayers = "none"
    schedule: Schedule = "synchronous"

    def __post_init__(self) -> None:
        for name, kind, examples in (
            ("local", LocalOptimizer, "sgd() or prox(0.01)"),
            ("server", ServerOptimizer, "server.sgd() or adam()"),
            ("aggregator", Aggregator, "median() or krum(1)"),
        ):
            if not isinstance(given := getattr(self, name), kind):
                raise InputError(f"an algorithm's {name} is one such as {examples}, not {given!r}.")
        for name, what, choices in (
            ("absent", "way to treat absent clients", get_args(Absent)),
            ("absent_loss", "way to treat absent clients' losses", get_args(AbsentLoss)),
            ("filter", "filter of updates", get_args(UpdateFilter)),
            ("own_layers", "choice of layers that stay with the clients", get_args(OwnLayers)),
            ("schedule", "schedule of rounds", get_args(Schedule)),
        ):
            if (given := getattr(self, name)) not in choices:
                raise InputError(f"unknown {what} '{given}'; choose {', '.join(choices[:-1])} or {choices[-1]}.")
        if isinstance(self.local, ControlledOptimizer) and not self.aggregator.is_linear:
            raise InputError(
                f"{self.local.name} keeps a plain mean of updates too, which {self.aggregator.name} does not guard; "
                "take the aggregator mean, or another local optimiser."
            )
        if self.schedule == "asynchronous":
            self._check_asynchronous()
        object.__setattr__(self, "step_sizes", tuple(self.step_sizes))
        for t, size in enumerate(self.step_sizes):
            if not (isinstance(size, int | float) and 0 <= size < math.inf):
                raise InputError(f"the step size of round {t} must be a finite number >= 0, not {size!r}.")

    def _check_asynchronous(self) -> None:
        """Refuse what relates the clients of a round to each other, which begin at different times."""
        name = self.local.name
        if isinstance(self.local, ControlledOptimizer):
            reason = f"{name} corrects clients by what the others sent in the round before"
        elif self.local.normalized:
            reason = f"{name} scales the steps of a client by those of the others in its round"
        elif self.own_layers != "none":
            reason = "layers that stay with the clients go from round to round"
        else:
            return
        raise InputError(f"{reason}, and asynchronous rounds have none; take synchronous ones, or sgd or prox.")

    def check_layers(self, layout: ParamLayout) -> None:
        """Refuse a model without the layers that are to stay with the clients."""
        if self.own_layers != "none":
            own_places(self.own_layers, layout)

    def step_size(self, t: int) -> float:
        """s_t."""
        return self.step_sizes[min(t, len(self.step_sizes) - 1)] if self.step_sizes else 1.0

    def request(self, run: str, t: int, model: Tensor, **more: Any) -> TrainRequest:
        """What it requests of a federation in round t from w^(t).

        Args:
            run: Names the randomness.
            t: The round.
            model: w^(t).
            **more: Other fields of the request.
        """
        return TrainRequest(
            run,
            t,
            model,
            self.local,
            absent_loss=self.absent_loss,
            stores_updates=self.absent == "remember",
            compares_updates=self.filter == "norm" or not self.aggregator.is_linear or self.server.reads_spread,
            **more,
        )

    def describe(self) -> dict[str, Any]:
        """Plain values, from which `from_description` makes it again."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value.describe() if isinstance(value, Part) else value for name, value in values.items()}

    @classmethod
    def from_description(cls, described: dict[str, Any]) -> "Algorithm":
        """The algorithm that `describe` wrote down; KeyError, TypeError or ValueError where it did not."""
        rest = dict(described)
        return cls(
            LOCAL_OPTIMIZERS.make(**rest.pop("local")),
            SERVER_OPTIMIZERS.make(**rest.pop("server")),
            aggregator=AGGREGATORS.make(**rest.pop("aggregator")),
            **rest,
        )


def check_algorithm(given: object) -> None:
    """Refuse what only looks like an algorithm, such as a method's name."""
    if not isinstance(given, Algorithm):
        raise InputError(f"an algorithm is an Algorithm, such as method('fednova').algorithm, not {given!r}.")
