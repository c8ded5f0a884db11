"""The `Federation` contract over clients that are somewhere else, whatever carries the messages.

The server computes what depends on several clients (who takes part, FedNova's scales, class weights) and sends it
along. Every draw is a pure function of seed, run, round and client id, so the numbers are those of the simulation. A
client that does not answer in time, or whose reply cannot be used, is absent in that round.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedunfold.config import Environment
from fedunfold.core.control import ControlledOptimizer
from fedunfold.core.errors import FederationError, InputError
from fedunfold.core.messages import ClientInfo, ClientUpdates, TrainRequest
from fedunfold.core.outcomes import Evaluation, OuterLossResult
from fedunfold.core.params import ModelFactory, ParamLayout, flatten_model, load_model, seeded
from fedunfold.core.participation import Participation, RoundRng, epochs_at
from fedunfold.core.parts import CLIENT_SAMPLERS
from fedunfold.core.server_data import ServerData
from fedunfold.engines.flower.control import LOST
from fedunfold.engines.flower.failures import Failures
from fedunfold.engines.flower.registrations import registered_clients
from fedunfold.engines.flower.replies import ExpectedReply, expected_reply, merge_replies, sum_vectors
from fedunfold.engines.flower.schema import (
    EXTRA,
    SHARED_CONTROL,
    Arrays,
    ClientDescription,
    ClientReply,
    MessageType,
    TrainInstruction,
)
from fedunfold.engines.simulation.evaluation import evaluation_of
from fedunfold.local import sgd

log = logging.getLogger("fedunfold")

Messages = Mapping[str, tuple[TrainInstruction, Arrays]]
"""What is sent to each client."""
Replies = Mapping[str, ClientReply | str]
"""What each client replied, or why there is no reply."""


class Transport(Protocol):
    """Carries a message to each of several clients and brings back their replies."""

    def registrations(self) -> Sequence[ClientDescription]:
        """The clients that have registered."""
        ...

    def send_and_receive(self, message_type: MessageType, messages: Messages) -> Replies:
        """Send messages by client id; clients that do not answer in time are left out of the replies."""
        ...


class RemoteFederation:
    """Clients behind a transport, in the environment's order.

    Its data are not looked at where it names its task: every client has its own.

    Args:
        transport: Carries messages to them.
        environment: How they train (epochs, minibatches, learning rate, seed), how many are sampled for a round and,
            where absences are to be simulated, how likely each can be reached.
        model: Builds a fresh model.
        evaluate: Tests models; where it is None the clients do, each on what it holds out, or else on its own samples.
        dtype: The type of the models.
        server_data: Gives the rows that the server holds, as it meets them in a round.

    Attributes:
        environment: As given.
        task: What models are trained for: the environment's task, or that of its data.
        lr: η, the clients' learning rate.
        failures: What went wrong with clients so far.
        clients: All K clients.
        num_held_out: How many samples each client tests models on without training on them, by its id.
        layout: What the entries of a model are.
        max_parallel_runs: 1; runs are carried out one after the other.
        sums_only: Whether the server sees sums of updates only.
    """

    max_parallel_runs = 1
    sums_only = False

    def __init__(
        self,
        transport: Transport,
        environment: Environment,
        model: ModelFactory,
        evaluate: Callable[[Sequence[Tensor]], Sequence[Evaluation]] | None,
        *,
        dtype: torch.dtype = torch.float32,
        server_data: Callable[[TrainRequest], ServerData | None] = lambda _: None,
    ) -> None:
        self.environment, self.lr = environment, environment.lr
        self.task = environment.task or environment.load().task
        self.failures = Failures()
        self.layout = ParamLayout.of(seeded(model, environment.seed, "shape"))
        self._transport, self._model, self._evaluate, self._dtype = transport, model, evaluate, dtype
        self._server_data = server_data
        found = registered_clients(transport.registrations(), environment, self.task)
        self.clients: Sequence[ClientInfo] = [ClientInfo(d.client_id, d.num_examples, d.label_counts) for d in found]
        self.num_held_out = {d.client_id: d.num_held_out for d in found}
        self._num_statistics = found[0].num_statistics
        self._own_training = [d.client_id for d in found if d.own_training]
        self._num_tested = {d.client_id: d.num_tested for d in found}
        self._sizes = {client.client_id: client.num_examples for client in self.clients}
        self._client_ids, self._num_examples = tuple(self._sizes), np.array(list(self._sizes.values()))
        self._label_counts = torch.tensor([client.label_counts for client in self.clients])
        self._sampler = CLIENT_SAMPLERS.parse(environment.client_sampler)

    def initial_model(self, run: str) -> Tensor:
        """w^(0) of a run, [d]."""
        return flatten_model(seeded(self._model, self.environment.seed, run)).to(self._dtype)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        """One round of local training from w^(t), for every run."""
        if any(request.own is not None for request in requests):
            raise InputError(
                "layers that stay with the clients are simulated only; over a network take own_layers='none'."
            )
        for request in requests:
            self._check_own_training(request)
        of_sampler = self._sampler.required_metrics
        return [self._train(replace(r, required_metrics=r.required_metrics | of_sampler)) for r in requests]

    def vjp(
        self, requests: Sequence[TrainRequest], participated: Sequence[Tensor], adjoints: Sequence[Tensor]
    ) -> list[Tensor]:
        """The exact local part of the adjoint: round t backward, for every run."""
        if self._own_training:
            raise InputError(
                f"client {self._own_training[0]} trains by a function of its own, whose derivative is not known; learn "
                "with adjoint='first_order'."
            )
        return [self._vjp(*of_run) for of_run in zip(requests, participated, adjoints, strict=True)]

    def outer_loss(self, requests: Sequence[TrainRequest]) -> list[OuterLossResult]:
        """The final evaluation at w^(T), for every run: all clients that answer, no update."""
        return [self._outer_loss(request) for request in requests]

    def evaluate(self, models: Sequence[Tensor]) -> Sequence[Evaluation]:
        """Metrics and loss of every model, on the test set or on the clients' own samples."""
        if self._evaluate is not None:
            return self._evaluate(models)
        return [self._evaluate_by_clients(model) for model in models]

    @property
    def num_test_rows(self) -> int:
        """How many rows models are tested on: those of the test set, or those that the clients test them on."""
        return sum(self._num_tested.values()) if self._evaluate is None else len(self.environment.load().y_test)

    def held_out_scores(self, model: Tensor) -> dict[str, float]:
        """The primary metric of a model on what each client holds out, of those that do and answer; a fraction is not
        in percent."""
        asked = [client_id for client_id, rows in self.num_held_out.items() if rows]
        replies = self._request("evaluate", TrainRequest("evaluation", 0, model, sgd()), asked) if asked else {}
        found = {client_id: self.task.metrics(reply.arrays["statistics"]) for client_id, reply in replies.items()}
        return {client_id: metrics[self.task.primary] for client_id, metrics in found.items()}

    def module(self, model: Tensor) -> nn.Module:
        """The module with the model w [d] in it, on the CPU, ready to predict."""
        module = seeded(self._model, self.environment.seed, "shape")
        load_model(module, model.cpu())
        return module.eval()

    # --- one run -----------------------------------------------------------------------------------------

    def _train(self, request: TrainRequest) -> ClientUpdates:
        self.task.check_metrics(request.required_metrics)
        rejected: dict[str, str] = {}
        replies = self._request("train", request, self._recipients(request), rejected=rejected)
        for client_id, reply in replies.items():
            if reply.metrics.get(LOST):
                about = "took part before and has lost its control variate since; it began again from zero"
                log.warning("round %d: client %s %s", request.round, client_id, about)
        return self._merge(request, replies, rejected)

    def _vjp(self, request: TrainRequest, participated: Tensor, adjoints: Tensor) -> Tensor:
        trained = self._named(participated.numpy())
        rows = dict(zip(trained, adjoints, strict=True))
        # The scales are those of the round as it was run: of all who were to train, also of those who did not answer.
        replies = self._request("vjp", request, trained, adjoints=rows)
        self._warn_of_missing(request, trained, replies)
        return sum_vectors([reply.arrays["adjoint"] for reply in replies.values()], request.model)

    def _outer_loss(self, request: TrainRequest) -> OuterLossResult:
        replies = self._request("outer_loss", request, self._client_ids)
        if not replies:
            raise FederationError(f"round {request.round}: no client answered with its outer loss.")
        gradient = sum_vectors([reply.arrays["gradient"] for reply in replies.values()], request.model)
        return OuterLossResult(sum(reply.metrics["outer_loss"] for reply in replies.values()), gradient)

    def _evaluate_by_clients(self, model: Tensor) -> Evaluation:
        """The metrics of all samples of the clients that answer, and their mean loss; NaN where none does."""
        statistics, replies = self._statistics(TrainRequest("evaluation", 0, model, sgd()))
        if not replies:
            return Evaluation(math.nan, math.nan)
        sizes = [self._num_tested[client_id] for client_id in replies]
        loss = np.average([reply.metrics["loss"] for reply in replies.values()], weights=sizes)
        return evaluation_of(self.task, statistics, float(loss))

    def _statistics(self, request: TrainRequest) -> tuple[Tensor, Mapping[str, ClientReply]]:
        """The sum of the clients' statistics of a model, and the replies of those that entered it."""
        replies = self._request("evaluate", request, self._client_ids)
        found = [reply.arrays["statistics"] for reply in replies.values()]
        return sum_vectors(found, torch.zeros(self._num_statistics, dtype=torch.float64)), replies

    def _merge(
        self, request: TrainRequest, replies: Mapping[str, ClientReply], rejected: Mapping[str, str]
    ) -> ClientUpdates:
        """The updates of a round from the replies to it."""
        steps, participation = self._num_steps(request.round), self._participation(request)
        report = merge_replies(request, self._sizes, participation, replies, self.layout, steps, rejected)
        server_data = self._server_data(request)
        return replace(report, label_counts=self._label_counts, lr=self.lr, server_data=server_data)

    def _check_own_training(self, request: TrainRequest) -> None:
        """Refuse what clients that train by functions of their own cannot do."""
        if not self._own_training:
            return
        about, optimizer = f"client {self._own_training[0]} trains by a function of its own", request.optimizer
        if optimizer != sgd():
            raise InputError(f"{about}, not by {optimizer.name}; leave out the local optimiser.")
        if request.outer_along_path is not None:
            raise InputError(
                f"{about}, so there is no outer loss '{request.outer_along_path.name}' along its training; learn for "
                "outer='every-round' or 'final'."
            )
        if "gradients" in request.required_metrics:
            raise InputError(f"{about}, which reports no gradients; take a rule that reads none.")

    # --- who takes part ----------------------------------------------------------------------------------

    def _participation(self, request: TrainRequest) -> Participation:
        env = self.environment
        return RoundRng(env.seed, request.run, request.round).participation(
            self._client_ids,
            [client.participation_probability for client in env.clients],
            self._num_examples,
            env.clients_per_round,
            self._sampler,
            request.reported,
        )

    def _named(self, chosen: np.ndarray) -> list[str]:
        """Ids of the chosen clients [K]."""
        return [self._client_ids[k] for k in np.flatnonzero(chosen)]

    def _recipients(self, request: TrainRequest) -> list[str]:
        """Those who train, and absent ones of the cohort where these report their loss, as in the simulation."""
        participation = self._participation(request)
        starts = request.absent_loss == "evaluate" and "start_loss" in request.required_metrics
        reports = request.evaluates_absent or starts
        return self._named(participation.cohort if reports else participation.participating)

    # --- messages ----------------------------------------------------------------------------------------

    def _request(
        self,
        message_type: MessageType,
        request: TrainRequest,
        client_ids: Sequence[str],
        *,
        adjoints: Mapping[str, Tensor] | None = None,
        rejected: dict[str, str] | None = None,
    ) -> dict[str, ClientReply]:
        """Send a message to these clients; the replies that can be used. Why others cannot, is added to `rejected`."""
        messages = self._messages(message_type, request, client_ids, adjoints)

        def read(reply: ClientReply, client_id: str) -> ClientReply:
            return self._expected(message_type, request, trains=messages[client_id][0].trains).check(reply)

        replies = self._transport.send_and_receive(message_type, messages)
        about = f"{message_type} in round {request.round}"
        return self.failures.accept_replies(replies, client_ids, about, read, rejected)

    def _expected(self, message_type: MessageType, request: TrainRequest, *, trains: bool) -> ExpectedReply:
        bounds: dict[str, Any] = {"least_loss": self.task.least_loss, "num_statistics": self._num_statistics}
        return expected_reply(message_type, request, trains=trains, **bounds)

    def _messages(
        self,
        message_type: MessageType,
        request: TrainRequest,
        client_ids: Sequence[str],
        adjoints: Mapping[str, Tensor] | None,
    ) -> Messages:
        """What each of these clients is to do, with what depends on the other clients of the cohort."""
        env, everybody = self.environment, np.ones(len(self.clients), dtype=bool)
        of_a_round = message_type not in ("outer_loss", "evaluate")
        participation = self._participation(request) if of_a_round else Participation(everybody, everybody)
        sizes = np.where(participation.cohort, self._num_examples, 0)
        steps = np.where(participation.participating, self._num_steps(request.round), 0)
        step_scales, update_scales = request.optimizer.scales(sizes, steps, env.lr)
        shared: dict[str, Tensor] = {"model": request.model}
        balancing = request.outer if self.task.num_groups > 1 else None
        weights = None if balancing is None else balancing.class_weights(self._label_counts)
        if weights is not None:
            shared["class_weights"] = weights.to(self._dtype)
        if request.broadcast is not None:
            shared |= {f"{EXTRA}{name}": vector for name, vector in request.broadcast.extras.items()}
        optimizer, control = request.optimizer, request.control if of_a_round else None
        if control is not None and isinstance(optimizer, ControlledOptimizer) and optimizer.reads_shared:
            shared[SHARED_CONTROL] = control.shared
        messages = {}
        for client_id in client_ids:
            k = self._client_ids.index(client_id)
            instruction = TrainInstruction.of(
                request,
                env,
                epochs=epochs_at(env.clients[k].epochs, request.round),
                trains=bool(participation.participating[k]),
                step_scale=float(step_scales[k]),
                update_scale=float(update_scales[k]),
                control_round=control.rounds.get(k, -1) if control and participation.participating[k] else None,
            )
            own = {"adjoint": adjoints[client_id]} if adjoints and client_id in adjoints else {}
            messages[client_id] = instruction, shared | own
        return messages

    def _num_steps(self, t: int) -> np.ndarray:
        """τ_k = E_k ⌈N_k/B⌉ of every client that trains in round t, [K]; 0 where it is not known."""
        if self._own_training:
            return np.zeros(len(self.clients), dtype=np.int64)
        epochs = np.array([epochs_at(client.epochs, t) for client in self.environment.clients])
        steps: np.ndarray = epochs * -(-self._num_examples // self.environment.batch_size)
        return steps

    def _warn_of_missing(self, request: TrainRequest, expected: Sequence[str], replies: Mapping[str, object]) -> None:
        if missing := [client_id for client_id in expected if client_id not in replies]:
            log.warning("round %d: the adjoint is computed without %s", request.round, ", ".join(missing))
