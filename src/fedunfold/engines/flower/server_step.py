"""The server's step of a Flower strategy: from the replies of a round to Θ and the next model."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch

from fedunfold.aggregation.absent import RememberedUpdates, coefficients
from fedunfold.aggregation.screening import NOT_USABLE, filter_updates, usable_ones
from fedunfold.aggregation.server_round import ServerState, aggregate, with_past
from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import DivergenceError, FederationError
from fedunfold.core.example_counts import cap_examples
from fedunfold.core.messages import ClientUpdates, OpenUpdates, TrainRequest
from fedunfold.core.participation import Participation
from fedunfold.core.threading import threads_for
from fedunfold.engines.flower.progress import Progress
from fedunfold.engines.flower.replies import Update, merge_replies
from fedunfold.engines.flower.reply_updates import ReplyUpdates, UnusableReplies
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.rules.rule import decide, requested_metrics
from fedunfold.server.sgd import SGD


def server_step(
    run: Progress,
    algorithm: Algorithm,
    updates: dict[str, Update],
    cohort: Collection[str],
    max_examples_ratio: float | None,
) -> dict[str, float]:
    """Weigh and aggregate.

    Args:
        run: Where the run stands; it is moved on.
        algorithm: What the server does with the updates.
        updates: Of this round, by client; those that cannot be used are taken out.
        cohort: Who was sampled for it.
        max_examples_ratio: How many times the median of the others N_k counts at most.

    Returns:
        Θ over the cohort.
    """
    known, cohort = run.roster.num_examples, set(cohort)
    while True:
        run.roster.num_examples = dict(known)
        for name, update in updates.items():
            run.roster.report_examples(name, update.num_examples)
        try:
            with threads_for(len(run.server.model)):  # what replies are read in are small pieces
                return _step(run, algorithm, updates, cohort, max_examples_ratio)
        except UnusableReplies as error:  # found while they were read; nothing has been changed by then
            for name in [run.client_ids[k] for k in error.clients]:
                run.failures.add(name, "rejected", f"round {run.round}: {NOT_USABLE} in its arrays")
                run.rejected[name] = f"{NOT_USABLE} in its arrays"
                del updates[name]
                cohort.discard(name)


def _step(
    run: Progress,
    algorithm: Algorithm,
    updates: dict[str, Update],
    cohort: set[str],
    max_examples_ratio: float | None,
) -> dict[str, float]:
    report = _report(run, algorithm, updates, cohort, max_examples_ratio)
    if not report.client_ids:
        raise FederationError("no client has sent an update that can be used so far.")
    if algorithm.filter == "norm":
        # Norms as they are: a client that claims many steps gets no larger limit for it.
        filtered = filter_updates(report, algorithm.filter, run.log_norms, normalized=True)
        report = filtered.report
        for entry in filtered.rejected:
            run.failures.add(entry.client, "rejected", f"round {run.round} {entry.reason}")
            del updates[entry.client]
    entering = _with_past(run, algorithm, report)
    decision, remembered = decide(run.rule, entering, run.rule_state)
    if isinstance(report.updates, ReplyUpdates) and is_plain_average(algorithm, run):
        # What `aggregate` makes of such a round, buffers included, in the place of the model that is there.
        if not report.updates.move_model(coefficients(decision.weights, report.participated)):
            raise DivergenceError(
                f"round {report.round}: the aggregated model is not finite; lower the learning rate of the clients."
            )
        server, eligible = ServerState(run.server.model, run.server.optimizer), report.participated
    else:
        ((server, aggregated),) = aggregate([run.server], [entering], [decision], algorithm)
        eligible = aggregated.eligible
    if algorithm.filter == "norm":
        run.log_norms.append(filtered.log_norms)
    run.server = server
    run.rule_state = remembered
    # Counters go as running statistics do: averaged as they are, without a step size or an optimiser.
    shares = coefficients(decision.weights, eligible).tolist()
    alpha = {name: a for name, a in zip(report.client_ids, shares, strict=True) if name in updates}
    run.counters = {
        # numpy makes a plain number of a sum of arrays without dimensions
        name: np.asarray(old + sum(a * (updates[k].arrays.counters[name] - old) for k, a in alpha.items()))
        for name, old in run.counters.items()
    }
    run.types = next((update.arrays.types for update in updates.values()), run.types)
    over_cohort = coefficients(decision.weights, report.cohort)
    return {report.client_ids[k]: float(over_cohort[k]) for k in torch.nonzero(report.cohort).flatten().tolist()}


def _with_past(run: Progress, algorithm: Algorithm, report: ClientUpdates) -> ClientUpdates:
    """The report as a rule gets it.

    What is remembered of a client makes way for what it has sent now, even if the round comes to nothing: two updates
    of each would take as much memory again as all replies.
    """
    updates = report.updates
    if algorithm.absent == "remember" and isinstance(updates, OpenUpdates):
        fresh = set(updates.clients[usable_ones(updates)].tolist())  # screened, before anything is let go of
        run.server = replace(run.server, memory={k: row for k, row in run.server.memory.items() if k not in fresh})
    entering = with_past(report, algorithm.absent, run.server)
    if isinstance(entering.remembered, RememberedUpdates):
        run.server = replace(run.server, memory=entering.remembered.memory)
    return entering


def is_plain_average(algorithm: Algorithm, run: Progress) -> bool:
    """Whether the next model is Σ_k α_k w_k of those who participate, and nobody asks how it came about."""
    plain = algorithm.server == SGD() and algorithm.absent == "drop" and algorithm.aggregator.is_linear
    return plain and algorithm.step_size(run.round) == 1 and getattr(run.rule, "numbers_only", False)


def _report(
    run: Progress,
    algorithm: Algorithm,
    updates: Mapping[str, Update],
    sampled: set[str],
    max_examples_ratio: float | None,
) -> ClientUpdates:
    """The round of all clients known so far; sampled ones without an update are absent."""
    metrics, model, layout, client_ids = (
        requested_metrics(run.rule),
        run.server.model,
        run.layout.params,
        run.client_ids,
    )
    num_examples = run.roster.num_examples
    if max_examples_ratio is not None:
        num_examples = cap_examples(num_examples, updates, max_examples_ratio)
    sizes = {client_id: num_examples.get(client_id, 0) for client_id in client_ids}
    trained = [k for k, name in enumerate(client_ids) if name in updates and name in sampled]
    clients = torch.tensor(trained, dtype=torch.long)
    pieces = [updates[client_ids[k]].arrays.pieces for k in trained]
    sent = ReplyUpdates(clients, pieces, model, layout.num_params)
    replies = {client_id: ClientReply(dict(update.metrics), {}) for client_id, update in updates.items()}
    if "norm" in metrics:
        for k, norm in zip(trained, sent.norms.tolist(), strict=True):
            replies[client_ids[k]] = ClientReply({**updates[client_ids[k]].metrics, "norm": norm}, {})
    steps = np.array([updates[name].num_steps if name in updates else 0 for name in client_ids], dtype=np.int64)
    cohort = np.array([client_id in sampled for client_id in client_ids], dtype=bool)
    request = TrainRequest("", run.round, model, algorithm.local, metrics)
    report = merge_replies(request, sizes, Participation(cohort, cohort), replies, layout, steps, updates=sent)
    report = replace(report, label_counts=run.roster.label_counts_of(client_ids))
    if run.staleness is not None:
        late = {run.roster.name(node): steps for node, steps in run.staleness.items()}
        report = replace(report, staleness=torch.tensor([late.get(name, 0) for name in client_ids]))
    if "gradients" not in metrics:
        return report
    # Up to the learning rate, which all clients share and angles do not see.
    gradients = layout.params(ReplyUpdates(clients, pieces, model, layout.num_params).rows.neg_())
    return replace(report, metrics=replace(report.metrics, gradients=gradients))
