"""A federated run: T rounds of train, weigh, aggregate, written once for every engine and every rule."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedunfold.aggregation.absent import (
    Absent,
    Contributions,
    check_absent,
    coefficients,
    contributions,
    hidden_direction,
    makes_step,
)
from fedunfold.aggregation.robust import Aggregator, mean
from fedunfold.aggregation.screening import (
    FilterResult,
    RejectedUpdate,
    UpdateFilter,
    check_update_filter,
    filter_updates,
)
from fedunfold.core.errors import DivergenceError, InputError
from fedunfold.core.federation import (
    AbsentLoss,
    ClientUpdates,
    Evaluation,
    Federation,
    HiddenSum,
    TrainRequest,
    evaluate_all,
    train_all,
)
from fedunfold.core.threading import threads_for
from fedunfold.core.warnings import of_run
from fedunfold.io.checkpoint import Checkpoint
from fedunfold.local.optimizers import LocalOptimizer, sgd
from fedunfold.rules.rule import WeightingRule
from fedunfold.server.optimizers import ServerOptimizer, plain
from fedunfold.training.state import RunState, fingerprint, load_states, save_states
from fedunfold.version import VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Algorithm:
    """How a federation is trained, the weights aside: the local update, the server, the absent clients, which updates
    are set aside (`screening`) and how the others are put together (`robust`).

    `step_sizes` s_t stretch the round's direction, u = s_t Σ_k α_k m_k; rounds beyond them repeat the last, and
    without any s_t = 1.

    >>> import fedunfold as fu
    >>> Algorithm(fu.prox(mu=0.1), fu.adam(lr=0.02), absent="drop").update.mu
    0.1
    """

    update: LocalOptimizer = field(default_factory=sgd)
    server: ServerOptimizer = field(default_factory=plain)
    absent: Absent = "keep"
    absent_loss: AbsentLoss = "evaluate"
    step_sizes: tuple[float, ...] = ()
    screen: UpdateFilter = "finite"
    aggregate: Aggregator = field(default_factory=mean)

    def __post_init__(self) -> None:
        if not isinstance(self.update, LocalOptimizer):
            raise InputError(f"an algorithm's update is one such as sgd() or prox(0.01), not {self.update!r}.")
        if not isinstance(self.server, ServerOptimizer):
            raise InputError(f"an algorithm's server is one such as plain() or adam(), not {self.server!r}.")
        check_absent(self.absent)
        check_update_filter(self.screen)
        if not isinstance(self.aggregate, Aggregator):
            raise InputError(f"an algorithm's aggregation is one such as median() or krum(1), not {self.aggregate!r}.")
        if self.absent_loss not in ("evaluate", "skip"):
            raise InputError(f"absent_loss is 'evaluate' or 'skip', not '{self.absent_loss}'.")
        object.__setattr__(self, "step_sizes", tuple(self.step_sizes))
        for t, size in enumerate(self.step_sizes):
            if not (isinstance(size, int | float) and 0 <= size < math.inf):
                raise InputError(f"the step size of round {t} must be a finite number >= 0, not {size!r}.")

    def step_size(self, round: int) -> float:
        """s_t."""
        return self.step_sizes[min(round, len(self.step_sizes) - 1)] if self.step_sizes else 1.0

    def request(self, run: str, round: int, model: Tensor, **more: Any) -> TrainRequest:
        """What it asks of a federation in a round from w^(t); `more` are the request's other fields."""
        return TrainRequest(
            run,
            round,
            model,
            self.update,
            absent_loss=self.absent_loss,
            keeps_updates=self.absent == "remember",
            compares_updates=self.screen == "norm" or self.aggregate.name != "mean",
            **more,
        )

    def filter_updates(self, report: ClientUpdates, past: Sequence[Tensor]) -> FilterResult:
        """The report without what is set aside; `past` are the lengths of the updates in the rounds before."""
        same_steps = self.update.normalise_steps or self.update.accumulate
        return filter_updates(report, self.screen, past, same_steps=same_steps)


def check_algorithm(given: object) -> None:
    """Refuse what only looks like an algorithm, such as a method's name."""
    if not isinstance(given, Algorithm):
        raise InputError(f"an algorithm is an Algorithm, such as method('fednova').algorithm, not {given!r}.")


@dataclass(frozen=True)
class Server:
    """What the server holds before a round: w^(t), its optimiser's state, its clients' last updates."""

    model: Tensor
    moments: tuple[Tensor, ...]
    memory: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Tensor, algorithm: Algorithm) -> "Server":
        return cls(model, algorithm.server.initial_state(model))


@dataclass(frozen=True)
class Aggregation:
    """One round put together: who was there [K], what entered it, and the direction u (None where no step was made).

    Where updates are hidden, those who were there are known only now: some may have been lost while they were added.
    """

    present: Tensor
    contributions: Contributions | HiddenSum
    direction: Tensor | None


def aggregate(
    server: Server, report: ClientUpdates, weights: Tensor, algorithm: Algorithm
) -> tuple[Server, Aggregation]:
    """The server's part of a round: from the clients' updates and Θ^(t) to w^(t+1), which is finite."""
    (made,) = aggregate_together([server], [report], [weights], algorithm)
    return made


def aggregate_together(
    servers: Sequence[Server], reports: Sequence[ClientUpdates], weights: Sequence[Tensor], algorithm: Algorithm
) -> list[tuple[Server, Aggregation]]:
    """`aggregate` for several runs in the same round; they are waited for once, where a GPU has to be."""
    made = [_aggregated(*of_run, algorithm) for of_run in zip(servers, reports, weights, strict=True)]
    if not torch.stack([after.model for after, _ in made]).sum(1).cpu().isfinite().all():
        raise DivergenceError(
            f"round {reports[0].round}: the aggregated model is not finite; lower the learning rate of the "
            f"server (now {algorithm.server.lr}) or of the clients."
        )
    return made


def _aggregated(
    server: Server, report: ClientUpdates, weights: Tensor, algorithm: Algorithm
) -> tuple[Server, Aggregation]:
    absent, step_size = algorithm.absent, algorithm.step_size(report.round)
    entering = contributions(report, absent, server.memory)
    if not makes_step(report.present, absent):
        return server, Aggregation(report.present, entering, None)
    if report.hidden is None:
        shares, combine = coefficients(weights, report.present, absent), algorithm.aggregate.combine
        direction = combine(entering.updates(), step_size * shares[entering.clients], report.statistics)
        moved = combine(report.updates, shares[report.present], report.statistics) if report.statistics else direction
        put_together = Aggregation(report.present, entering, direction)
    else:
        found, moved = hidden_direction(report.hidden, weights, absent)
        direction = step_size * moved
        present = torch.isin(torch.arange(len(report.keys)), found.clients)
        put_together = Aggregation(present, found, direction)
    model, moments = algorithm.server.step(server.model, direction, server.moments)
    if report.statistics:
        # Running statistics are averaged: no server optimiser, no step size, none from memory.
        tail = slice(-report.statistics, None)
        model = torch.cat([model[: -report.statistics], server.model[tail] + moved[tail]])
    return Server(model, moments, entering.memory), put_together


@dataclass(frozen=True)
class RunResult:
    """One run: the final model, Θ[T, K] as used, who was there [T, K], and the test after every round.

    `rejected` are clients whose part of a round was not used; `warnings` say what else is odd, a line each.

    >>> import fedunfold as fu
    >>> result = fu.run("digits-label-skew", "uniform-fedavg")
    >>> result.weights[0].tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """

    model: Tensor
    weights: Tensor
    present: Tensor
    evaluations: tuple[Evaluation, ...]
    rejected: tuple[RejectedUpdate, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rounds, clients = self.weights.shape
        return f"RunResult(rounds={rounds}, clients={clients}, accuracy={self.accuracies[-1]:.3f})"

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy after every round, as fractions."""
        return [evaluation.accuracy for evaluation in self.evaluations]


def run_rounds(
    federation: Federation,
    rule: WeightingRule,
    rounds: int,
    *,
    algorithm: Algorithm | None = None,
    run: str = "trial-0",
    digest: str = "",
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = 0.0,
    on_round: Callable[[int, Evaluation], bool | None] | None = None,
) -> RunResult:
    """Train a federation for some rounds under a weighting rule, testing after each.

    `run` names the randomness: another name gives another initial model, minibatch order and presence. With a
    `checkpoint`, where the run stands is written to that file after every round (or at most every
    `checkpoint_seconds`, after the last one and at Ctrl-C; None: 5), and a file already there is gone on from: the
    result is the same as without the interruption. `digest` stands for the data and how clients train, as for `learn`;
    a checkpoint with another one is refused.
    """

    def tell(round: int, evaluations: Sequence[Evaluation]) -> None:
        if on_round is not None:
            on_round(round, evaluations[0])

    (result,) = run_together(
        federation,
        rule,
        rounds,
        [run],
        algorithm=algorithm,
        digest=digest,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        on_round=tell,
    )
    return result


def _identity(
    federation: Federation, rule: WeightingRule, algorithm: Algorithm, runs: Sequence[str], digest: str
) -> dict[str, Any]:
    """What a checkpoint of runs belongs to. The initial models stand for the seed, the model and the precision, a
    rule's name for the rule."""
    weights = getattr(rule, "weights", None)
    starts = [federation.initial_model(run) for run in runs]
    return {
        "runs": list(runs),
        "rule": rule.name,
        "weights": fingerprint(weights) if isinstance(weights, Tensor) else None,
        "algorithm": asdict(algorithm),
        "clients": [asdict(client) for client in federation.clients],
        "device": starts[0].device.type,
        "starts": [fingerprint(start) for start in starts],
        "lr": federation.lr,
        "digest": digest,
        "version": VERSION,
    }


def run_together(
    federation: Federation,
    rule: WeightingRule,
    rounds: int,
    runs: Sequence[str],
    *,
    algorithm: Algorithm | None = None,
    digest: str = "",
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = 0.0,
    on_round: Callable[[int, Sequence[Evaluation]], bool | None] | None = None,
) -> list[RunResult]:
    """`run_rounds` for several runs in step, which a federation that trains them together does faster."""
    algorithm = algorithm or Algorithm()
    if rounds < 1:
        raise InputError(f"a run needs at least 1 round, not {rounds}.")
    algorithm.aggregate.check_enough(len(federation.clients))
    starts = [Server.start(federation.initial_model(run), algorithm) for run in runs]
    states = [RunState(start.model, start.moments) for start in starts]
    kept, saved = None, 0
    if checkpoint is not None:
        identity = _identity(federation, rule, algorithm, runs, digest)
        kept = Checkpoint(checkpoint, "run", identity, checkpoint_seconds)
        states = load_states(kept, starts[0].model.device) or states
        saved = states[0].rounds
    if saved > rounds:
        raise InputError(f"the run has made {saved} rounds already, more than the {rounds} asked for.")
    if 0 < saved < rounds:
        log.info("going on from round %d of %d, kept in %s", saved, rounds, checkpoint)
    try:
        for t in range(saved, rounds):
            with threads_for(len(federation.clients) * len(starts[0].model)):
                states = _after_round(federation, rule, algorithm, runs, states, t)
            if kept is not None and (kept.due or t == rounds - 1):
                save_states(kept, states)
                saved = t + 1
            if on_round is not None:
                on_round(t, [state.evaluations[-1] for state in states])
    except KeyboardInterrupt:
        if kept is not None and states[0].rounds > saved:
            save_states(kept, states)
        raise
    return [_result(state, algorithm) for state in states]


def _result(state: RunState, algorithm: Algorithm) -> RunResult:
    weights, present, rejected = torch.stack(state.weights), torch.stack(state.present), tuple(state.rejected)
    entering = present.cumsum(0) > 0 if algorithm.absent == "remember" else present
    warnings = of_run(present, entering, rejected, algorithm.aggregate.needed)
    return RunResult(state.model, weights, present, tuple(state.evaluations), rejected, warnings)


def _after_round(
    federation: Federation,
    rule: WeightingRule,
    algorithm: Algorithm,
    runs: Sequence[str],
    states: Sequence[RunState],
    t: int,
) -> list[RunState]:
    """Round t of every run; the states before it stay as they are."""
    requests = [
        algorithm.request(run, t, state.model, needs=rule.needs) for run, state in zip(runs, states, strict=True)
    ]
    reports = train_all(federation, requests)
    sifted = [algorithm.filter_updates(report, state.lengths) for report, state in zip(reports, states, strict=True)]
    ruled = [rule(found.report, state.rule) for found, state in zip(sifted, states, strict=True)]
    servers = [Server(state.model, state.moments, state.memory) for state in states]
    made = aggregate_together(servers, [found.report for found in sifted], [row for row, _ in ruled], algorithm)
    tests = evaluate_all(federation, [server.model for server, _ in made])
    return [
        RunState(
            server.model,
            server.moments,
            server.memory,
            remembered,
            [*state.weights, row],
            [*state.present, put_together.present],
            [*state.evaluations, test],
            [*state.lengths, found.lengths],
            [*state.rejected, *found.rejected],
        )
        for state, found, (row, remembered), (server, put_together), test in zip(
            states, sifted, ruled, made, tests, strict=True
        )
    ]
