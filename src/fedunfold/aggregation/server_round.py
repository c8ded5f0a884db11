"""The server's part of a round: from the clients' updates and Θ^(t) to w^(t+1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from fedunfold.aggregation.absent import RememberedUpdates, coefficients, eligible_clients, with_memory
from fedunfold.aggregation.control import next_control
from fedunfold.core.algorithm import Absent, Algorithm
from fedunfold.core.control import Control, ControlledOptimizer
from fedunfold.core.errors import DivergenceError
from fedunfold.core.messages import ClientUpdates, Metric, OpenSum, OpenUpdates, WeightedSum
from fedunfold.core.params import ParamLayout
from fedunfold.core.parts import RoundDecision, RoundInfo, State


@dataclass(frozen=True)
class ServerState:
    """What the server holds before a round.

    Attributes:
        model: w^(t), [d].
        optimizer: The state of its optimiser.
        memory: Last updates of clients by index, under `remember`.
        direction: u^(t−1), for a rule that decides on a momentum; None before the first step.
        mean: Σ_k α_k m_k of the last round that any update entered, for a rule that reads it; None before the first.
        reported: What clients last reported of the metrics that the client sampler requires, [K] each.
        control: Control variates, where the local optimiser has some.
    """

    model: Tensor
    optimizer: State
    memory: Mapping[int, Tensor] = field(default_factory=dict)
    direction: Tensor | None = None
    mean: Tensor | None = None
    reported: Mapping[Metric, Tensor] = field(default_factory=dict)
    control: Control | None = None

    @classmethod
    def start(cls, model: Tensor, algorithm: Algorithm) -> "ServerState":
        """Before the first round."""
        control = Control.start(model) if isinstance(algorithm.local, ControlledOptimizer) else None
        return cls(model, algorithm.server.init(model), control=control)

    def widened(self) -> "ServerState":
        """The same in double precision."""
        memory = {k: row.double() for k, row in self.memory.items()}
        direction, mean = (None if part is None else part.double() for part in (self.direction, self.mean))
        optimizer = tuple(part.double() if part.is_floating_point() else part for part in self.optimizer)
        return replace(
            self, model=self.model.double(), optimizer=optimizer, memory=memory, direction=direction, mean=mean
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        tensors = {"model": self.model} | {f"moment-{i}": moment for i, moment in enumerate(self.optimizer)}
        if self.direction is not None:
            tensors["direction"] = self.direction
        if self.mean is not None and self.mean is not self.direction:
            tensors["mean"] = self.mean
        tensors |= {f"reported-{name}": values for name, values in self.reported.items()}
        if self.control is not None:
            tensors |= self.control.to_tensors()
        return tensors | {f"update-{k}": update for k, update in self.memory.items()}

    @classmethod
    def from_tensors(cls, found: Mapping[str, Tensor], device: torch.device) -> "ServerState":
        """What `to_tensors` gave, among other tensors; ValueError where its vectors [d] of floats are not alike."""
        single, several = ("model", "direction", "mean", "control"), ("moment-", "update-", "control-")
        names = [name for name in found if name in single or name.startswith(several)]
        own = {name: found[name].to(device) for name in names}
        model = own["model"]
        if not all(v.dim() == 1 and v.shape == model.shape and v.is_floating_point() for v in own.values()):
            raise ValueError("its vectors are not alike")
        moments = [own[f"moment-{i}"] for i in range(sum(name.startswith("moment-") for name in own))]
        memory = {int(name.removeprefix("update-")): t for name, t in own.items() if name.startswith("update-")}
        direction = own.get("direction")
        reported = {name: found[f"reported-{name}"] for name in get_args(Metric) if f"reported-{name}" in found}
        control = None
        if "control" in own:
            control = Control.from_tensors(own | {"control_rounds": found["control_rounds"]})
        mean = own.get("mean", direction)
        return cls(model, tuple(moments), dict(sorted(memory.items())), direction, mean, reported, control)

    @property
    def carried(self) -> dict[str, Any]:
        """What a request of the next round has of it beside the model."""
        return {"reported": self.reported, "control": self.control}


def with_past(report: ClientUpdates, absent: Absent, server: ServerState) -> ClientUpdates:
    """The report as a rule gets it: with remembered updates, the direction of the round before, and w^(t)."""
    return replace(with_memory(report, absent, server.memory), previous=server.mean, model=server.model)


def last_reported(before: Mapping[Metric, Tensor], report: ClientUpdates) -> Mapping[Metric, Tensor]:
    """What the client sampler reads in later rounds, with what those who participated reported in this one."""
    if report.selection is None:
        return before
    after = {}
    for name in sorted(report.selection.sampler.required_metrics):
        now = report.metric(name).double().cpu()
        known = report.participated.cpu() & now.isfinite()
        after[name] = torch.where(known, now, before.get(name, torch.full_like(now, torch.nan)))
    return after


@dataclass(frozen=True)
class Aggregated:
    """One round aggregated.

    Attributes:
        participated: Whose updates entered it, [K]; of secure updates some may have been lost in the summation.
        eligible: S, over whom the weights were normalised, [K].
        entered: What entered the direction.
        direction: u; None where there was no step.
        info: What the server's optimiser was shown.
    """

    participated: Tensor
    eligible: Tensor
    entered: WeightedSum
    direction: Tensor | None
    info: RoundInfo


def aggregate(
    servers: Sequence[ServerState],
    reports: Sequence[ClientUpdates],
    decisions: Sequence[RoundDecision],
    algorithm: Algorithm,
    lr: float = math.nan,
) -> list[tuple[ServerState, Aggregated]]:
    """The server's part of the same round of several runs; a GPU is waited for once.

    Args:
        servers: Where each run stands.
        reports: What its clients sent.
        decisions: What its rule decided.
        algorithm: How all of them are trained.
        lr: η of the clients, for control variates.

    Returns:
        For every run the server after the round, whose model is finite, and what entered it.
    """
    done = [_aggregate(*of_run, algorithm, lr) for of_run in zip(servers, reports, decisions, strict=True)]
    if not torch.stack([after.model.sum() for after, _ in done]).cpu().isfinite().all():
        raise DivergenceError(
            f"round {reports[0].round}: the aggregated model is not finite; lower the learning rate of the "
            f"server ({algorithm.server}) or of the clients."
        )
    return done


def layer_spread(updates: Tensor, layout: ParamLayout) -> Tensor:
    """mean_k ‖Δ_k − Δ̄‖ of every layer, [L], for updates [n, d] with the plain mean Δ̄; 0 where there are none."""
    layers = layout.split_layers(updates)
    if not len(updates):
        return updates.new_zeros(len(layers))
    return torch.stack([(own - own.mean(0)).norm(dim=1).mean() for own in layers])


def _aggregate(
    server: ServerState, report: ClientUpdates, decision: RoundDecision, algorithm: Algorithm, lr: float
) -> tuple[ServerState, Aggregated]:
    report = with_memory(report, algorithm.absent, server.memory)
    updates = report.entering
    memory = updates.memory if isinstance(updates, RememberedUpdates) else server.memory
    eligible = eligible_clients(report, algorithm.absent)
    alpha = coefficients(decision.weights, eligible)
    combine, layout = algorithm.aggregator.combine, report.layout
    entered: WeightedSum
    if algorithm.aggregator.is_linear:
        entered = updates.weighted_sum(alpha)
    else:
        entered = OpenSum(combine(updates.rows, alpha[updates.clients], layout), updates.clients, updates)
    participated, mean = report.participated, entered.total
    if not isinstance(report.updates, OpenUpdates):
        participated = torch.isin(torch.arange(len(report.client_ids)), entered.clients)
        if algorithm.absent == "drop" and bool((share := alpha[entered.clients].sum()) > 0):
            eligible, mean = participated, mean / share.to(mean)
    clients = entered.clients
    norms = updates.norms if isinstance(updates, OpenUpdates) else None
    examples, steps = report.num_examples[clients], report.num_steps[clients]
    spread = layer_spread(updates.rows, layout) if algorithm.server.reads_spread else None
    info = RoundInfo(report.round, layout, alpha[clients], norms, examples, steps, spread)
    if algorithm.absent == "drop" and not bool(participated.any()):
        return server, Aggregated(participated, eligible, entered, None, info)
    step = algorithm.step_size(report.round) * decision.step
    direction = mean if step == 1 else step * mean
    if decision.momentum and server.direction is not None:
        direction = direction + decision.momentum * server.direction
    model, optimizer = algorithm.server.trusted_update(server.model, direction, server.optimizer, info, decision.trust)
    if decision.scale != 1:
        model = decision.scale * model
    if layout.num_buffer_entries:
        fresh, own = mean, report.updates
        if isinstance(own, OpenUpdates) and own is not updates:  # nothing from memory
            linear = algorithm.aggregator.is_linear
            fresh = own.weighted_sum(alpha).total if linear else combine(own.rows, alpha[own.clients], layout)
        model = layout.with_buffers(model, layout.buffers(server.model) + layout.buffers(fresh))
    reported, local, control = last_reported(server.reported, report), algorithm.local, server.control
    if control is not None and isinstance(local, ControlledOptimizer) and bool(participated.any()):
        model, control = next_control(model, control, local, report, lr)
    after = ServerState(model, optimizer, memory, direction, mean if len(clients) else server.mean, reported, control)
    return after, Aggregated(participated, eligible, entered, direction, info)
