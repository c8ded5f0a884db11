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
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedunfold.aggregation.screening import NOT_USABLE
from fedunfold.core.algorithm import Absent, Algorithm, UpdateFilter
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import FederationError, FedunfoldError, InputError
from fedunfold.core.messages import Metric
from fedunfold.core.parts import Aggregator, ServerOptimizer
from fedunfold.engines.flower.bfloat16 import BFLOAT16, PRECISION
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.progress import Evaluate, Progress
from fedunfold.engines.flower.replies import Update, is_possible, mean_metrics, read_content
from fedunfold.engines.flower.server_step import server_step
from fedunfold.rules import size
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import Weigh, WeightingRule, as_rule, for_rounds, remarks_of, requested_metrics

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
        remember_clients: With "remember", the updates of so many clients are remembered at most, those of the clients
            that were connected last.
        remember_rounds: A client without a lasting id is forgotten, and its update with it, when its node has not been
            connected for more rounds than that: it comes back as another node, if at all. Registered ones are not.
        update_precision: With "bfloat16", clients whose app has `bfloat16_mod` send updates in half as many bytes;
            every entry is off by at most 2⁻⁸ of itself.
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
        remember_clients: int = 1000,
        remember_rounds: int = 5,
        update_precision: Literal["bfloat16"] | None = None,
        checkpoint: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if max_examples_ratio is not None and not 1 <= max_examples_ratio < math.inf:
            raise InputError(f"WeightedStrategy needs a finite max_examples_ratio >= 1, not {max_examples_ratio}.")
        if remember_clients < 1 or remember_rounds < 0:
            raise InputError(
                "WeightedStrategy needs remember_clients >= 1 and remember_rounds >= 0, not "
                f"{remember_clients} and {remember_rounds}."
            )
        if update_precision not in (None, BFLOAT16):
            raise InputError(f"WeightedStrategy has update_precision='bfloat16' or None, not {update_precision!r}.")
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
        if self.algorithm.schedule == "asynchronous":
            raise InputError("WeightedStrategy waits for all clients of a round; take a rule for synchronous rounds.")
        self.failures = Failures()
        self.weights: list[dict[str, float]] = []
        self._metric_names = metric_names or {}
        self._max_examples_ratio = max_examples_ratio
        self._update_precision = update_precision
        self._remember_rounds, self._remember_clients = remember_rounds, remember_clients
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
        run = self._begin(initial_arrays, for_rounds(self.rule, num_rounds))
        if self._checkpoint is not None:
            settings = {"weighted_by_key": self.weighted_by_key, "max_examples_ratio": self._max_examples_ratio}
            settings |= {"remember_rounds": self._remember_rounds, "remember_clients": self._remember_clients}
            horizon = None if run.rule is self.rule else num_rounds
            run.open(
                self._checkpoint, {"algorithm": self.algorithm.describe(), "horizon": horizon, **settings}, num_rounds
            )
            self.failures, self.weights = run.failures, run.weights
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

    def _begin(self, arrays: ArrayRecord, rule: WeightingRule) -> Progress:
        self._run = run = Progress.start(arrays, rule, self.algorithm)
        self.failures, self.weights = run.failures, run.weights
        return run

    # --- a round ---------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages; those who are sent one are the cohort, and the updates are counted from these arrays.

        In a loop of somebody else's, such as that of a wrapper, a run begins with the first round that is configured.
        """
        run = self._run
        if run is None or run.resumed < server_round <= run.server_round:
            if self._checkpoint is not None:
                raise InputError("only WeightedStrategy's own start() resumes from a checkpoint; give none here.")
            run = self._begin(arrays, self.rule)
        if run.is_past("train", server_round):
            return ()
        run.adopt(arrays)
        if self._update_precision is not None:
            config[PRECISION] = self._update_precision
        run.asked, run.messages = server_round, tuple(super().configure_train(server_round, arrays, config, grid))
        run.roster.note_connected(set(grid.get_node_ids()), run.round)
        run.forget(self._remember_rounds)
        return run.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, and FedAvg's means of the clients' metrics."""
        run, replies = self._run, list(replies)
        if run is None:
            raise InputError(
                "WeightedStrategy aggregates what clients made of a model that it knows; call its start() or its "
                "configure_train() first."
            )
        if run.is_past("train", server_round):
            return run.record(), run.metrics["train"].get(server_round)
        if run.asked != server_round:  # messages of another's making: those who reply are the cohort
            run.asked, run.messages = server_round, ()
        if not (run.messages or replies):
            return None, None
        self._check_and_log_replies(replies, is_train=True, validate=False)
        rejected = run.rejected = {}
        by_client = self._by_client(run, replies, rejected)
        cohort = [name for name in run.sampled() or by_client if name not in rejected]
        expected = dict.fromkeys([*by_client, *cohort])
        read = partial(self._read_update, run)
        updates = self.failures.accept_replies(by_client, expected, f"round {run.round}", read, rejected)
        if any(update.arrays.dtype == np.float64 for update in updates.values()):
            run.widen()
        weights: dict[str, float] = {}
        try:
            weights = server_step(run, self.algorithm, updates, cohort, self._max_examples_ratio)
        except FedunfoldError as error:
            run.problem = str(error).rstrip(".") if updates or not rejected else run.first_rejection
            log.error("round %d is skipped: %s", run.round, error)
        else:
            run.has_trained |= bool(updates)
            run.problem = run.first_rejection
        run.round += 1
        run.limit_memory(self._remember_clients)
        self.weights.append(weights)
        contents = [update.content for update in updates.values()] if weights else []
        metrics = mean_metrics(contents, self.weighted_by_key, self.train_metrics_aggr_fn)
        run.note("train", server_round, metrics)
        run.server_round = server_round
        run.save()
        return run.record(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages."""
        run = self._run
        if run is not None and run.is_past("evaluate", server_round):
            return ()
        messages = tuple(super().configure_evaluate(server_round, arrays, config, grid))
        if run is not None:
            run.evaluating = messages
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """FedAvg's means of the clients' metrics."""
        run, replies = self._run, list(replies)
        if run is None:
            return super().aggregate_evaluate(server_round, replies)
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

    # --- clients ---------------------------------------------------------------------------------------

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
            if over in (client_ids := run.client_ids):
                memory = {k: row for k, row in run.server.memory.items() if client_ids[k] != over}
                run.server = replace(run.server, memory=memory)
            name = run.roster.name(node)
            run.rename(before, name)
            found[name] = reply
        return found

    def _read_update(self, run: Progress, message: Message, client_id: str) -> Update:
        content, metrics, count = read_content(message, self.weighted_by_key)
        records = list(content.array_records.values())
        if len(records) != 1:
            raise InputError(f"has {len(records)} array records in place of one")
        if client_id not in (getattr(run.rule, "client_ids", None) or (client_id,)):
            raise InputError(
                f"is a client that the weights '{run.rule.name}' do not name; have it register with registration_mod"
            )
        arrays = run.layout.read(records[0], run.sent)
        if not arrays.has_finite_counters:
            raise InputError(f"{NOT_USABLE} in its arrays")
        numbers: dict[str, float] = {}
        for metric in requested_metrics(run.rule) - {"gradients", "norm"}:
            name = self._metric_names.get(metric, metric)
            value = metrics.get(name)
            if isinstance(value, int | float) and is_possible(metric, value):
                numbers[metric] = float(value)
            elif metric in run.rule.required_metrics:
                raise InputError(f"has {value!r} for '{name}', which rule '{run.rule.name}' requires")
        steps = metrics.get(self._metric_names.get("num_steps", "num_steps"))
        return Update(arrays, numbers, steps if isinstance(steps, int) and steps > 0 else 0, content, count)
