"""The `Federation` contract over clients that are somewhere else, whatever carries the messages.

The server computes what depends on several clients (who is asked, FedNova's scales, class weights) and sends it
along. Every draw is a pure function of seed, run, round and client key, so the numbers are those of the
simulation. A client that does not answer in time, or answers nonsense, is absent in that round.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedunfold.aggregation.screening import NOT_USABLE, usable
from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.federation import ClientInfo, ClientUpdates, Evaluation, OuterLossResult, TrainRequest
from fedunfold.core.params import ModelFactory, flat_model, seeded, statistics
from fedunfold.engines.flower.faults import Faults
from fedunfold.engines.flower.schema import (
    Arrays,
    ClientDescription,
    ClientReply,
    MessageType,
    TrainInstruction,
    UpdateRule,
    checked,
)
from fedunfold.engines.simulation.schedule import ClientSlice, RoundRng
from fedunfold.local.optimizers import sgd

log = logging.getLogger("fedunfold")

Answers = Mapping[str, ClientReply | str]
"""By client key: what it said, or why there is nothing to be had from it."""


class Channel(Protocol):
    """Carries one message to each of several clients and brings back what they say in time."""

    def registrations(self) -> Sequence[ClientDescription]:
        """The clients there are."""
        ...

    def ask(self, verb: MessageType, messages: Mapping[str, tuple[TrainInstruction, Arrays]]) -> Answers:
        """Ask clients by key; those that say nothing are left out of the answers."""
        ...


class RemoteFederation:
    """Clients behind a channel, in the environment's order of keys.

    The environment says how they train (epochs, minibatches, learning rate, seed) and, where absences are to be
    simulated, their reliability. Its data are not looked at: every client has its own. `evaluate` tests a model;
    where it is None, the clients do, each on its own samples.
    """

    def __init__(
        self,
        channel: Channel,
        environment: Environment,
        model: ModelFactory,
        evaluate: Callable[[Tensor], Evaluation] | None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.environment = environment
        self.faults = Faults()
        self._channel, self._model, self._evaluate, self._dtype = channel, model, evaluate, dtype
        self._statistics = sum(part.numel() for part in statistics(seeded(model, environment.seed, "shape")).values())
        self._clients = self._register()
        self._sizes = np.array([client.samples for client in self._clients], dtype=np.float64)
        self._label_counts = torch.tensor([client.label_counts for client in self._clients])

    @property
    def clients(self) -> Sequence[ClientInfo]:
        return self._clients

    @property
    def lr(self) -> float:
        return self.environment.lr

    def initial_model(self, run: str) -> Tensor:
        return flat_model(seeded(self._model, self.environment.seed, run)).to(self._dtype)

    def train(self, request: TrainRequest) -> ClientUpdates:
        drawn = self._present(request)
        refused: dict[str, str] = {}
        answers = self._ask("train", request, self._asked(request, drawn), present=drawn, refused=refused)
        return self._merged(request, drawn, answers, refused)

    def backprop(self, request: TrainRequest, present: Tensor, adjoints: Tensor) -> Tensor:
        there = [key for key, is_there in zip(self._keys, present.tolist(), strict=True) if is_there]
        rows = dict(zip(there, adjoints, strict=True))
        # The scales are those the round was run with: of all who were asked, also of those who did not answer.
        answers = self._ask("backprop", request, there, present=self._present(request), adjoints=rows)
        if missing := [key for key in there if key not in answers]:
            log.warning("round %d: the adjoint goes on without %s", request.round, ", ".join(missing))
        return _sum([answer.arrays["adjoint"] for answer in answers.values()], request.model)

    def outer(self, request: TrainRequest) -> OuterLossResult:
        everybody = np.ones(len(self._keys), dtype=bool)
        answers = self._ask("outer", request, self._keys, present=everybody)
        if not answers:
            raise InputError(f"round {request.round}: no client answered with its outer loss.")
        gradient = _sum([answer.arrays["gradient"] for answer in answers.values()], request.model)
        return OuterLossResult(sum(answer.metrics["outer_loss"] for answer in answers.values()), gradient)

    def evaluate(self, model: Tensor) -> Evaluation:
        return self._evaluated_by_clients(model) if self._evaluate is None else self._evaluate(model)

    def _evaluated_by_clients(self, model: Tensor) -> Evaluation:
        """Mean over all samples of the clients that answer; NaN where none does."""
        everybody = np.ones(len(self._keys), dtype=bool)
        answers = self._ask("evaluate", TrainRequest("evaluation", 0, model, sgd()), self._keys, present=everybody)
        shares = {client.key: client.samples for client in self._clients if client.key in answers}

        def mean(name: str) -> float:
            total = sum(n * answers[key].metrics[name] for key, n in shares.items())
            return total / sum(shares.values()) if shares else math.nan

        return Evaluation(mean("accuracy"), mean("loss"))

    # --- asking ------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> tuple[str, ...]:
        return tuple(client.key for client in self._clients)

    def _register(self) -> tuple[ClientInfo, ...]:
        found = {entry.key: entry for entry in self._channel.registrations()}
        expected = [client.key for client in self.environment.clients]
        if missing := [key for key in expected if key not in found]:
            raise InputError(f"client '{missing[0]}' has not registered; start it, or take it out of the environment.")
        first = found[expected[0]]
        for other in (found[key] for key in expected):
            if (other.features, len(other.label_counts)) != (first.features, len(first.label_counts)):
                raise InputError(
                    f"client {other.key} has rows of shape {list(other.features)} and {len(other.label_counts)} "
                    f"classes, {first.key} has {list(first.features)} and {len(first.label_counts)}; make them alike."
                )
        return tuple(ClientInfo(key, found[key].samples, found[key].label_counts) for key in expected)

    def _present(self, request: TrainRequest) -> np.ndarray:
        env = self.environment
        participation_probability = [client.participation_probability for client in env.clients]
        return RoundRng(env.seed, request.run, request.round).present(
            self._keys, participation_probability, env.clients_per_round
        )

    def _asked(self, request: TrainRequest, drawn: np.ndarray) -> tuple[str, ...]:
        """Those who train; an absent client that can still be asked tells its loss, as in the simulation."""
        asks_absent = request.absent_loss == "evaluate" and (
            bool(request.needs & {"loss", "start_loss"}) or self._outer_along_the_way(request)
        )
        return tuple(key for key, is_there in zip(self._keys, drawn, strict=True) if is_there or asks_absent)

    def _messages(
        self,
        request: TrainRequest,
        keys: Sequence[str],
        present: np.ndarray,
        adjoints: Mapping[str, Tensor] | None = None,
    ) -> dict[str, tuple[TrainInstruction, Arrays]]:
        assignments = self._assignments(request, present)
        shared: dict[str, Tensor] = {"model": request.model}
        weights = None if request.outer is None else request.outer.class_weights(self._label_counts)
        if weights is not None:
            shared["class_weights"] = weights.to(self._dtype)
        own = {key: {"adjoint": row} for key, row in (adjoints or {}).items()}
        return {key: (assignments[key], shared | own.get(key, {})) for key in keys}

    def _ask(
        self,
        verb: MessageType,
        request: TrainRequest,
        keys: Sequence[str],
        *,
        present: np.ndarray,
        adjoints: Mapping[str, Tensor] | None = None,
        refused: dict[str, str] | None = None,
    ) -> dict[str, ClientReply]:
        """Ask these clients, and keep the answers that are what was asked for; why others are not, is in `refused`."""
        messages = self._messages(request, keys, present, adjoints)

        def read(answer: ClientReply, key: str) -> ClientReply:
            return checked(answer, *self._expected(verb, request, messages[key][0]))

        answers = self._channel.ask(verb, messages)
        return self.faults.sifted(answers, keys, f"{verb} in round {request.round}", read, refused)

    def _assignments(self, request: TrainRequest, present: np.ndarray) -> dict[str, TrainInstruction]:
        env = self.environment
        epochs = [env.epochs(k, request.round) for k in range(len(self._keys))]
        shares = [ClientSlice(c.key, 0, c.samples, e) for c, e in zip(self._clients, epochs, strict=True)]
        steps = np.where(present, [share.steps(env.batch_size) for share in shares], 0)
        inside, after = request.update.scales(self._sizes, steps, env.lr)
        return {
            key: TrainInstruction(
                run=request.run,
                round=request.round,
                seed=env.seed,
                lr=env.lr,
                batch_size=env.batch_size,
                epochs=epochs[k],
                update=UpdateRule.of(request.update),
                needs=tuple(sorted(request.needs)),
                outer=None if request.outer is None else request.outer.name,
                path_gradient=request.path_gradient,
                trains=bool(present[k]),
                inside=float(inside[k]),
                after=float(after[k]),
            )
            for k, key in enumerate(self._keys)
        }

    @staticmethod
    def _outer_along_the_way(request: TrainRequest) -> bool:
        return request.outer is not None and not request.outer.only_last_layer

    def _expected(
        self, verb: MessageType, request: TrainRequest, assignment: TrainInstruction
    ) -> tuple[dict[str, Tensor], set[str], set[str]]:
        """What the arrays of a right answer are like, the names of its numbers, and those that may be NaN."""
        vector = request.model
        if verb == "backprop":
            return {"adjoint": vector}, set(), set()
        if verb == "evaluate":
            return {}, {"loss", "accuracy"}, set()
        if verb == "outer":
            return {"gradient": vector}, {"outer_loss"}, set()
        if verb == "inner":
            return {}, {"inner"}, set()
        arrays = {}
        if assignment.trains:
            arrays["updates"] = vector
            if "gradients" in request.needs:
                arrays["gradients"] = vector
        if self._outer_along_the_way(request) and (request.path_gradient or not assignment.trains):
            arrays["outer_gradient"] = vector
        numbers = {"outer_loss", *(need for need in request.needs if need != "gradients")}
        return {} if verb == "measure" else arrays, numbers, set() if assignment.trains else {"accuracy"}

    # --- putting together --------------------------------------------------------------------------------

    def _merged(
        self, request: TrainRequest, drawn: np.ndarray, answers: Mapping[str, ClientReply], refused: Mapping[str, str]
    ) -> ClientUpdates:
        """The report of a round in which those drawn and heard of were there."""
        keys = self._keys
        # Judged as `screening` does, and before outer parts are summed: those of a client set aside do not count.
        sent = {key: answer.arrays["updates"] for key, answer in answers.items() if "updates" in answer.arrays}
        lost = {key for key, update in sent.items() if not usable(update[None])}
        if len(lost) < len(sent):
            answers = {key: answer for key, answer in answers.items() if key not in lost}
            refused = {**refused, **dict.fromkeys(lost, NOT_USABLE)}
        present = np.array([bool(is_there) and key in answers for key, is_there in zip(keys, drawn, strict=True)])
        trained = [key for key, is_there in zip(keys, present, strict=True) if is_there]
        there = [answers[key] for key in trained]
        assignments = self._assignments(request, present)
        env = self.environment
        steps = [
            assignments[key].epochs * -(-client.samples // env.batch_size) if is_there else 0
            for key, client, is_there in zip(keys, self._clients, present, strict=True)
        ]

        def numbers(name: str) -> Tensor | None:
            if name not in request.needs:
                return None
            found = [answers[key].metrics[name] if key in answers else float("nan") for key in keys]
            return torch.tensor(found, dtype=torch.float64)

        def rows(name: str) -> Tensor:
            found = [answer.arrays[name] for answer in there if name in answer.arrays]
            return torch.stack(found) if found else request.model.new_empty(0, len(request.model))

        # Where updates are compared, the outer parts of those who are there wait until it is known who stays.
        summed = {key: answer for key, answer in answers.items() if not request.compares_updates or key not in trained}
        outer = [answer.arrays["outer_gradient"] for answer in summed.values() if "outer_gradient" in answer.arrays]
        own_losses = torch.tensor([answer.metrics["outer_loss"] for answer in there], dtype=torch.float64)
        own_gradients = rows("outer_gradient")
        return ClientUpdates(
            round=request.round,
            keys=keys,
            sizes=torch.tensor(self._sizes),
            present=torch.from_numpy(present),
            steps=torch.tensor(steps),
            updates=rows("updates"),
            loss=numbers("loss"),
            start_loss=numbers("start_loss"),
            accuracy=numbers("accuracy"),
            gradients=rows("gradients") if "gradients" in request.needs else None,
            outer_loss=sum(answer.metrics["outer_loss"] for answer in summed.values()),
            outer_gradient=_sum(outer, request.model) if outer else None,
            per_client_outer_loss=own_losses if request.compares_updates else None,
            per_client_outer_gradients=own_gradients if request.compares_updates and len(own_gradients) else None,
            statistics=self._statistics,
            refused=refused,
        )


def _sum(vectors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(vectors)).sum(0) if vectors else torch.zeros_like(like)
