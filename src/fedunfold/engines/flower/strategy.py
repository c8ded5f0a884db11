"""A Flower strategy with any weighting rule, for people who already have a Flower app.

    from fedunfold.engines.flower import WeightedStrategy
    strategy = WeightedStrategy(fu.fedadp())
    result = strategy.start(grid, initial_arrays, num_rounds=10)

It takes the place of `FedAvg`. Clients need no change, and get no messages that FedAvg does not send: a client is known
by the id of its node and counts with the examples it reports. With `registration_mod` in the client app its replies
bring an id that outlives a restart, and its size is fixed by the first one; learned weights need that.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedunfold.aggregation.absent import coefficients
from fedunfold.aggregation.screening import NOT_USABLE, filter_updates, is_usable
from fedunfold.aggregation.server_round import aggregate, with_past
from fedunfold.core.algorithm import Absent, Algorithm, UpdateFilter
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import FederationError, FedunfoldError, InputError
from fedunfold.core.example_counts import cap_examples
from fedunfold.core.messages import ClientUpdates, Metric, TrainRequest
from fedunfold.core.participation import Participation
from fedunfold.core.parts import Aggregator, ServerOptimizer
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.progress import Evaluate, Progress
from fedunfold.engines.flower.replies import Update, is_possible, mean_metrics, merge_replies, read_content
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import Weigh, WeightingRule, as_rule, decide, for_rounds, remarks_of, requested_metrics

Reported = Metric | Literal["num_steps"]

log = logging.getLogger("fedunfold")


class WeightedStrategy(FedAvg):
    """Average clients by a weighting rule instead of by the sizes they report.

    With `size()` it is `FedAvg`: the same models, of the same types, and the same metrics, which are aggregated as
    FedAvg does whatever the rule. The clients sampled for a round are those that are sent a train message; weights are
    over these. A reply that is an error, has other arrays than were sent, values that are not finite, or lacks what the
    rule requires is rejected: it is logged with the client's id, counted in `failures`, and its client is absent in
    that round. A round of which the rule or the server can make nothing leaves the model as it is; a run without a
    round that trained ends with a `FederationError`.

    Args:
        rule: Any of fedunfold's rules, learned weights included, or a function of your own; size by default. What it
            can do without (`optional_metrics`) is NaN for clients that do not report it.
        server: A server optimiser.
        absent: What becomes of sampled clients that did not answer; "drop" by default. Learned weights bring the
            server, absence and step sizes they were learned for, and so does a pre-trained rule its server and absence.
        filter: With "norm", updates whose norm is far too large are rejected (`aggregation.screening`).
        aggregator: How the others become one direction (`aggregation.robust`).
        metric_names: Under which names your clients report what the rule reads (loss, start_loss, accuracy,
            num_steps).
        max_examples_ratio: What a client reports as its examples counts up to this many times the median of the
            round's others; None, the default, believes everybody, as FedAvg does.
        checkpoint: A file in which every round is saved, once its training is aggregated: model, server optimiser,
            remembered updates, the rule's state, metrics. Where it exists, `start` resumes from it, and the result is
            that of a run without the interruption.
        **settings: `FedAvg`'s.

    Attributes:
        rule: The weighting rule.
        algorithm: What the server does with the updates.
        failures: What went wrong with clients.
        weights: Θ of every round over the clients sampled for it, by client id; empty where a round was skipped.

    >>> import fedunfold as fu
    >>> WeightedStrategy(fu.uniform(), absent="remember").algorithm.absent
    'remember'
    """

    def __init__(
        self,
        rule: WeightingRule | Weigh | None = None,
        *,
        server: ServerOptimizer | None = None,
        absent: Absent | None = None,
        filter: UpdateFilter | None = None,
        aggregator: Aggregator | None = None,
        metric_names: Mapping[Reported, str] | None = None,
        max_examples_ratio: float | None = None,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if max_examples_ratio is not None and not 1 <= max_examples_ratio < math.inf:
            raise InputError(f"WeightedStrategy needs a finite max_examples_ratio >= 1, not {max_examples_ratio}.")
        self.rule = as_rule(rule or size())
        learned_for = Algorithm(absent="drop")
        if isinstance(self.rule, LearnedWeights) and "algorithm" in self.rule.settings:
            learned_for = self.rule.algorithm
        if isinstance(self.rule, ParametricRule) and self.rule.algorithm is not None:
            learned_for = self.rule.algorithm
        changes: dict[str, Any] = {"server": server, "absent": absent, "filter": filter, "aggregator": aggregator}
        self.algorithm = replace(learned_for, **{name: part for name, part in changes.items() if part is not None})
        if isinstance(local := self.algorithm.local, ControlledOptimizer):
            raise InputError(f"the rule is for {local.name}, by which no client of an app trains; take another rule.")
        self.failures = Failures()
        self.weights: list[dict[str, float]] = []
        self._metric_names = metric_names or {}
        self._max_examples_ratio = max_examples_ratio
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._run: Progress | None = None

    def summary(self) -> None:
        """Log how clients are weighted, and FedAvg's settings."""
        log.info("weights by %s, absent clients: %s", self.rule.name, self.algorithm.absent)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds, from where the checkpoint stands or else from scratch: nothing of an earlier start is left.

        Rounds of before a restart are not carried out again; their metrics are in the result all the same.

        Args:
            grid: Flower's grid.
            initial_arrays: The initial model; one that is resumed has the checkpoint's values.
            num_rounds: T; a rule that has `with_horizon` is told it.
            timeout: `FedAvg`'s, as are the next three.
            train_config: Sent to clients that train.
            evaluate_config: Sent to clients that evaluate.
            evaluate_fn: The server's own evaluation.

        Raises:
            FederationError: There were rounds to train in, and none of them did.
        """
        if isinstance(self.rule, LearnedWeights) and num_rounds > len(self.rule.weights):
            raise InputError(f"the weights were learned for {len(self.rule.weights)} rounds; run as many or fewer.")
        run = Progress.start(initial_arrays, for_rounds(self.rule, num_rounds), self.algorithm)
        if self._checkpoint is not None:
            counting = {"weighted_by_key": self.weighted_by_key, "max_examples_ratio": self._max_examples_ratio}
            horizon = None if run.rule is self.rule else num_rounds
            about = {"algorithm": self.algorithm.describe(), "horizon": horizon, **counting}
            run.open(self._checkpoint, about, num_rounds)
        self._run, self.failures, self.weights = run, run.failures, run.weights
        evaluate = run.replaying(evaluate_fn)
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate)
        if run.round and not run.has_trained:
            raise FederationError(
                f"none of {run.round} rounds has trained the model, the last one because {run.problem}; the log has "
                "the reason for every client and round."
            )
        for remark in remarks_of(run.rule, run.rule_state):
            log.warning(remark)
        return result

    # --- a round ---------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages; those who are sent one are the cohort."""
        run = self._started()
        if run.is_past("train", server_round):
            return ()
        run.messages = tuple(super().configure_train(server_round, arrays, config, grid))
        run.roster.forget_nodes(set(grid.get_node_ids()))
        return run.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, and FedAvg's means of the clients' metrics."""
        run, replies = self._started(), list(replies)
        if run.is_past("train", server_round):
            return run.arrays, run.metrics["train"].get(server_round)
        if not run.messages:
            return None, None
        self._check_and_log_replies(replies, is_train=True, validate=False)
        rejected: dict[str, str] = {}
        by_client = self._by_client(run, replies, rejected)
        cohort = [name for name in self._sampled(run) if name not in rejected]
        expected = dict.fromkeys([*by_client, *cohort])
        about = f"round {run.round}"
        updates = self.failures.accept_replies(by_client, expected, about, self._read_update, rejected)
        weights: dict[str, float] = {}
        reason = next((f"client {name} {reason}" for name, reason in rejected.items()), "no client answered")
        try:
            weights = self._step(run, updates, cohort)
        except FedunfoldError as error:
            run.problem = str(error).rstrip(".") if updates or not rejected else reason
            log.error("round %d is skipped: %s", run.round, error)
        else:
            run.has_trained |= bool(updates)
            run.problem = reason
        run.round += 1
        self.weights.append(weights)
        contents = [update.content for update in updates.values()] if weights else []
        metrics = mean_metrics(contents, self.weighted_by_key, self.train_metrics_aggr_fn)
        run.note("train", server_round, metrics)
        run.server_round = server_round
        run.save()
        return run.arrays, metrics

    def _step(self, run: Progress, updates: dict[str, Update], cohort: Iterable[str]) -> dict[str, float]:
        """Weigh and aggregate; rejected clients are taken out of the updates. Gives Θ over the cohort."""
        if any(update.arrays.vector.dtype == torch.float64 for update in updates.values()):
            run.widen()
        report = self._report(run, updates, set(cohort))
        if not report.client_ids:
            raise FederationError("no client has sent an update that can be used so far.")
        # Norms as they are: a client that claims many steps gets no larger limit for it.
        filtered = filter_updates(report, self.algorithm.filter, run.log_norms, normalized=True)
        for entry in filtered.rejected:
            self.failures.add(entry.client, "rejected", f"round {run.round} {entry.reason}")
            del updates[entry.client]
        entering = with_past(filtered.report, self.algorithm.absent, run.server)
        decision, remembered = decide(run.rule, entering, run.rule_state)
        ((run.server, aggregated),) = aggregate([run.server], [entering], [decision], self.algorithm)
        run.log_norms.append(filtered.log_norms)
        run.rule_state = remembered
        # Counters go as running statistics do: averaged as they are, without a step size or an optimiser.
        shares = coefficients(decision.weights, aggregated.eligible).tolist()
        alpha = {name: a for name, a in zip(report.client_ids, shares, strict=True) if name in updates}
        run.counters = {
            # numpy makes a plain number of a sum of arrays without dimensions
            name: np.asarray(old + sum(a * (updates[k].arrays.counters[name] - old) for k, a in alpha.items()))
            for name, old in run.counters.items()
        }
        run.types = next((update.arrays.types for update in updates.values()), run.types)
        over_cohort = coefficients(decision.weights, report.cohort)
        return {report.client_ids[k]: float(over_cohort[k]) for k in torch.nonzero(report.cohort).flatten().tolist()}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages."""
        run = self._started()
        if run.is_past("evaluate", server_round):
            return ()
        run.messages = tuple(super().configure_evaluate(server_round, arrays, config, grid))
        return run.messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """FedAvg's means of the clients' metrics."""
        run, replies = self._started(), list(replies)
        if run.is_past("evaluate", server_round):
            return run.metrics["evaluate"].get(server_round)
        self._check_and_log_replies(replies, is_train=False, validate=False)
        by_client = {run.roster.name(run.sender(reply)): reply for reply in replies}
        about = f"evaluation in round {server_round}"
        found = self.failures.accept_replies(
            by_client, by_client, about, lambda reply, _: read_content(reply, self.weighted_by_key)[0]
        )
        metrics = mean_metrics(list(found.values()), self.weighted_by_key, self.evaluate_metrics_aggr_fn)
        return run.note("evaluate", server_round, metrics)

    def _started(self) -> Progress:
        if self._run is None:
            raise InputError("a WeightedStrategy is run by its start().")
        return self._run

    # --- clients ---------------------------------------------------------------------------------------

    def _sampled(self, run: Progress) -> list[str]:
        return [run.roster.name(message.metadata.dst_node_id) for message in run.messages]

    def _client_ids(self, run: Progress) -> list[str]:
        """All clients, in an order that stays: the server's memory goes by position."""
        return list(self.rule.client_ids if isinstance(self.rule, LearnedWeights) else run.roster.num_examples)

    def _by_client(self, run: Progress, replies: Iterable[Message], rejected: dict[str, str]) -> dict[str, Message]:
        """Replies by the ids of clients, with what those have brought that register now."""
        found = {}
        for reply in replies:
            before = run.roster.name(node := run.sender(reply))
            try:
                over = None if reply.has_error() else run.roster.identify(node, reply.content)
            except InputError as error:
                name = run.roster.name(node)
                self.failures.add(name, "rejected", f"round {run.round}: {error}")
                rejected[name] = str(error)
                continue
            if over in (client_ids := self._client_ids(run)):
                memory = {k: row for k, row in run.server.memory.items() if client_ids[k] != over}
                run.server = replace(run.server, memory=memory)
            name = run.roster.name(node)
            run.rename(before, name)
            found[name] = reply
        return found

    def _read_update(self, message: Message, client_id: str) -> Update:
        run = self._started()
        content, metrics, count = read_content(message, self.weighted_by_key)
        records = list(content.array_records.values())
        if len(records) != 1:
            raise InputError(f"has {len(records)} array records in place of one")
        if isinstance(self.rule, LearnedWeights) and client_id not in self.rule.client_ids:
            raise InputError("is a client the weights were not learned for; have it register with registration_mod")
        arrays = run.layout.read(records[0])
        if not (arrays.is_usable and is_usable((arrays.vector - run.server.model)[None])):
            raise InputError(f"{NOT_USABLE} in its arrays")
        numbers: dict[str, float] = {}
        for metric in requested_metrics(self.rule) - {"gradients", "norm"}:
            name = self._metric_names.get(metric, metric)
            value = metrics.get(name)
            if isinstance(value, int | float) and is_possible(metric, value):
                numbers[metric] = float(value)
            elif metric in self.rule.required_metrics:
                raise InputError(f"has {value!r} for '{name}', which rule '{self.rule.name}' requires")
        steps = metrics.get(self._metric_names.get("num_steps", "num_steps"))
        run.roster.report_examples(client_id, count)
        return Update(arrays, numbers, steps if isinstance(steps, int) and steps > 0 else 0, content)

    def _report(self, run: Progress, updates: Mapping[str, Update], sampled: set[str]) -> ClientUpdates:
        """The round of all clients known so far; sampled ones without an update are absent."""
        metrics, model, layout = requested_metrics(self.rule), run.server.model, run.layout.params
        replies = {}
        for client_id, update in updates.items():
            arrays = {"updates": update.arrays.vector.to(model.dtype) - model}
            numbers = dict(update.metrics)
            if "norm" in metrics:
                numbers["norm"] = float(layout.params(arrays["updates"]).norm())
            if "gradients" in metrics:  # up to the learning rate, which all clients share and angles do not see
                arrays["gradients"] = -layout.params(arrays["updates"])
            replies[client_id] = ClientReply(numbers, arrays)
        client_ids, num_examples = self._client_ids(run), run.roster.num_examples
        if self._max_examples_ratio is not None:
            num_examples = cap_examples(num_examples, updates, self._max_examples_ratio)
        sizes = {client_id: num_examples.get(client_id, 0) for client_id in client_ids}
        steps = np.array([updates[name].num_steps if name in updates else 0 for name in client_ids], dtype=np.int64)
        cohort = np.array([client_id in sampled for client_id in client_ids], dtype=bool)
        request = TrainRequest("", run.round, model, self.algorithm.local, metrics)
        report = merge_replies(request, sizes, Participation(cohort, cohort), replies, layout, steps)
        return replace(report, label_counts=run.roster.label_counts_of(client_ids))
