"""A federated run: T rounds of training, weighting and aggregation, written once for every engine and every rule."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from fedunfold.aggregation.screening import filter_updates
from fedunfold.aggregation.server_round import ServerState, aggregate, with_past
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.federation import Federation
from fedunfold.core.messages import ClientUpdates
from fedunfold.core.outcomes import Evaluation
from fedunfold.core.own_layers import OwnEntries
from fedunfold.core.params import fingerprint
from fedunfold.core.run_names import fresh_run
from fedunfold.core.run_result import RunResult
from fedunfold.core.threading import threads_for
from fedunfold.core.warnings import of_run
from fedunfold.io.checkpoint import Checkpoint, stored_identity
from fedunfold.rules.rule import WeightingRule, decide, describe_rule, remarks_of, requested_metrics
from fedunfold.training.clock import Arrived, Clock
from fedunfold.training.state import RunState, load_states, save_states
from fedunfold.version import VERSION

log = logging.getLogger(__name__)


def run_rounds(
    federation: Federation,
    rule: WeightingRule,
    rounds: int,
    runs: Sequence[str] | None = None,
    *,
    algorithm: Algorithm | None = None,
    digest: str = "",
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = 0.0,
    clock: Clock | None = None,
    on_round: Callable[[int, Sequence[Evaluation]], bool | None] | None = None,
) -> list[RunResult]:
    """Train a federation for some rounds under a weighting rule, testing after each.

    With a `checkpoint`, where the runs stand is saved to that file, and a file that exists is resumed from: the
    result is the same as without the interruption.

    Args:
        federation: Who trains.
        rule: How clients are weighted.
        rounds: T.
        runs: Names of the runs that are carried out together. A name stands for randomness: another one gives another
            initial model, minibatch order and participation. By default one run, "trial-0"; where the server sees sums
            of updates only, one under a fresh name, which its checkpoint holds.
        algorithm: How clients and server train.
        digest: Stands for the data and how clients train, as for `learn`; a checkpoint with another one is refused.
        checkpoint: The file.
        checkpoint_seconds: It is saved at most that often, and after the last round and at Ctrl-C; 0: after every
            round, None: every 5 seconds.
        clock: When updates reach the server, in simulated time; by default in the round they were trained in, and there
            is no time. Whoever has not arrived counts as absent. Asynchronous rounds need one.
        on_round: Called after every round with its number and the test of every run; where it returns True, training
            stops early.

    Returns:
        A result for every run.
    """
    algorithm = algorithm or Algorithm()
    if rounds < 1:
        raise InputError(f"a run needs at least 1 round, not {rounds}.")
    algorithm.aggregator.check_enough(len(federation.clients))
    if clock is None and algorithm.schedule == "asynchronous":
        raise InputError("asynchronous rounds are simulated, by a clock, and here is none; take synchronous rounds.")
    runs = _default_runs(federation, checkpoint) if runs is None else runs
    servers = [ServerState.start(federation.initial_model(run), algorithm) for run in runs]
    first = servers[0].model
    own = OwnEntries.start(algorithm.own_layers, federation.layout, first)
    states = [RunState(server, own=own) for server in servers]
    store, saved = None, 0
    if checkpoint is not None:
        identity = {  # the initial models stand for the seed, the model and the precision
            "runs": list(runs),
            **describe_rule(rule),
            "horizon": getattr(rule, "horizon", None),
            "algorithm": algorithm.describe(),
            "clients": [asdict(client) for client in federation.clients],
            "device": first.device.type,
            "starts": [fingerprint(state.server.model) for state in states],
            "lr": federation.lr,
            "digest": digest,
            "clock": None if clock is None else clock.describe(),
            "version": VERSION,
        }
        store = Checkpoint(checkpoint, "run", identity, checkpoint_seconds)
        states = load_states(store, first.device) or states
        saved = states[0].rounds
    if saved > rounds:
        raise InputError(f"the run has made {saved} rounds already, more than the {rounds} requested.")
    if 0 < saved < rounds:
        log.info("resuming from round %d of %d, saved in %s", saved, rounds, checkpoint)

    def save(*, at_once: bool = False) -> None:
        nonlocal saved
        if store is not None and states[0].rounds > saved and (at_once or store.should_save):
            save_states(store, states)
            saved = states[0].rounds

    try:
        for t in range(saved, rounds):
            if clock is not None and clock.limit is not None and all(state.is_past(clock.limit) for state in states):
                break
            with threads_for(len(federation.clients) * len(first)):
                states = _next_round(federation, rule, algorithm, clock, runs, states, t)
            save(at_once=t == rounds - 1)
            if on_round is not None and on_round(t, [state.evaluations[-1] for state in states]):
                break
    except KeyboardInterrupt:
        save(at_once=True)
        raise
    save(at_once=True)
    sizes = torch.tensor([client.num_examples for client in federation.clients], dtype=torch.float64)
    return [_result(state, rule, algorithm, sizes) for state in states]


def _default_runs(federation: Federation, checkpoint: Path | None) -> Sequence[str]:
    """The name of the only run: a fresh one where only sums are seen, unless a checkpoint has one already."""
    if not federation.sums_only:
        return ["trial-0"]
    stored = None if checkpoint is None else stored_identity(checkpoint)
    return stored["runs"] if stored and "runs" in stored else [fresh_run("trial-0")]


def _next_round(
    federation: Federation,
    rule: WeightingRule,
    algorithm: Algorithm,
    clock: Clock | None,
    runs: Sequence[str],
    states: Sequence[RunState],
    t: int,
) -> list[RunState]:
    """Round t of every run; the states before it stay as they are."""
    requests = [
        algorithm.request(
            *(run, t, state.server.model),
            required_metrics=requested_metrics(rule),
            own=state.own,
            participation=None if clock is None else clock.participation(run, t),
            **state.server.carried,
        )
        for run, state in zip(runs, states, strict=True)
    ]
    trained = zip(runs, federation.train(requests), states, strict=True)
    arrived = [
        Arrived(report, None) if clock is None else clock.arrive(run, report, state.clock)
        for run, report, state in trained
    ]
    normalized = algorithm.local.normalized
    filtered = [
        filter_updates(found.report, algorithm.filter, state.log_norms, normalized=normalized)
        for found, state in zip(arrived, states, strict=True)
    ]
    kept = [_kept(found.report, state.own) for found, state in zip(filtered, states, strict=True)]
    reports = [
        with_past(report, algorithm.absent, state.server) for (report, _), state in zip(kept, states, strict=True)
    ]
    decided = [decide(rule, report, state.rule) for report, state in zip(reports, states, strict=True)]
    decisions, owned = [decision for decision, _ in decided], [own for _, own in kept]
    servers = aggregate([state.server for state in states], reports, decisions, algorithm, federation.lr)
    tests = federation.evaluate(
        [_whole(server.model, own, reports[0].num_examples) for (server, _), own in zip(servers, owned, strict=True)]
    )
    return [
        RunState(
            server,
            remembered,
            [*state.weights, decision.weights],
            [*state.participated, aggregated.participated],
            [*state.evaluations, test],
            [*state.log_norms, found.log_norms],
            [*state.rejected, *found.rejected],
            timed.state,
            own,
            [*state.times, *(() if timed.time is None else (timed.time,))],
            [*state.staleness, *_mean_staleness(timed.report)],
        )
        for state, timed, found, (decision, remembered), (server, aggregated), test, own in zip(
            states, arrived, filtered, decided, servers, tests, owned, strict=True
        )
    ]


def _mean_staleness(report: ClientUpdates) -> tuple[float, ...]:
    """That of the updates which arrived; nothing in synchronous rounds."""
    if report.staleness is None:
        return ()
    arrived = report.staleness[report.participated]
    return (float(arrived.double().mean()) if len(arrived) else 0.0,)


def _kept(report: ClientUpdates, own: OwnEntries | None) -> tuple[ClientUpdates, OwnEntries | None]:
    """A round without what the clients came to in their own layers, and these after it."""
    if own is None or report.metrics.own is None:
        return report, own
    clients = torch.nonzero(report.participated).flatten().tolist()
    return replace(report, metrics=replace(report.metrics, own=None)), own.trained(clients, report.metrics.own)


def _whole(model: Tensor, own: OwnEntries | None, num_examples: Tensor) -> Tensor:
    """The server's model, with the mean of the clients' own layers where some stay with them."""
    return model if own is None else own.mean_in(model, num_examples)


def _result(state: RunState, rule: WeightingRule, algorithm: Algorithm, num_examples: Tensor) -> RunResult:
    weights, participated = torch.stack(state.weights), torch.stack(state.participated)
    entering = participated.cumsum(0) > 0 if algorithm.absent == "remember" else participated
    rejected = tuple(state.rejected)
    odd = of_run(participated, entering, rejected, algorithm.aggregator.min_updates)
    warnings = (*odd, *remarks_of(rule, state.rule))
    model = _whole(state.server.model, state.own, num_examples)
    return RunResult(
        model,
        weights,
        participated,
        tuple(state.evaluations),
        rejected,
        warnings,
        own=state.own,
        times=tuple(state.times),
        staleness=tuple(state.staleness),
    )
