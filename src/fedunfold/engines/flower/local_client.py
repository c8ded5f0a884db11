"""One client, alone with its data. It answers every request with the numbers it would give in the simulation.

It is the simulation: an engine with a single client in it, made anew for every request. What depends on the
others (the scales of FedNova, class weights) comes with the request, so nothing is kept between messages and a
client may restart at any time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.federation import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.core.task import OuterLoss
from fedunfold.data.federated import FederatedData
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, TrainInstruction
from fedunfold.engines.simulation import SimulatedFederation


@dataclass(frozen=True, eq=False)
class LocalClient:
    """A client's key, samples and model. `classes` counts all of the federation's, also those it does not hold."""

    key: str
    x: Tensor
    y: Tensor
    classes: int
    model: ModelFactory
    dtype: torch.dtype = torch.float32

    def register(self) -> ClientDescription:
        counts = torch.bincount(self.y, minlength=self.classes)
        return ClientDescription(self.key, tuple(counts.tolist()), tuple(self.x.shape[1:]))

    def train(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """A round of local training from w^(t), or, where it does not train, its losses at w^(t)."""
        federation, request = self._engine(assignment, arrays)
        report = federation.train(request)
        found = {"updates": report.updates, "gradients": report.gradients}
        replied = {name: rows[0] for name, rows in found.items() if rows is not None and len(rows)}
        if report.outer_gradient is not None:
            replied["outer_gradient"] = report.outer_gradient
        numbers = {"loss": report.loss, "start_loss": report.start_loss, "accuracy": report.accuracy}
        metrics = {name: float(value[0]) for name, value in numbers.items() if value is not None}
        return ClientReply(metrics | {"outer_loss": report.outer_loss}, replied)

    def backprop(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """The same round walked backwards from `arrays["adjoint"]`, with the minibatches it met."""
        federation, request = self._engine(assignment, arrays)
        adjoint = _array(arrays, "adjoint").to(self.dtype)
        added = federation.backprop(request, torch.tensor([True]), adjoint[None])
        return ClientReply({}, {"adjoint": added})

    def outer(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """The outer loss of the last layer, and its gradient."""
        federation, request = self._engine(assignment, arrays)
        report = federation.outer(request)
        return ClientReply({"outer_loss": report.loss}, {"gradient": report.gradient})

    def measure(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """A round as in `train`, of which only its numbers are told."""
        return ClientReply(self.train(assignment, arrays).metrics, {})

    def inner(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """⟨λ, w_k − w^(t)⟩ of the same round, for λ = `arrays["adjoint"]`."""
        update = self.train(assignment, arrays).arrays["updates"]
        return ClientReply({"inner": float(update @ _array(arrays, "adjoint").to(self.dtype))}, {})

    def evaluate(self, assignment: TrainInstruction, arrays: Arrays) -> ClientReply:
        """Mean loss and accuracy of a model on this client's own samples."""
        federation, request = self._engine(assignment, arrays)
        found = federation.evaluate(request.model)
        return ClientReply({"loss": found.loss, "accuracy": found.accuracy}, {})

    def _engine(self, assignment: TrainInstruction, arrays: Arrays) -> tuple[SimulatedFederation, TrainRequest]:
        model = _array(arrays, "model").to(self.dtype)
        data = FederatedData((self.key,), self.x, self.y, (0, len(self.y)), self.x, self.y, self.classes)
        env = Environment.from_arrays(
            {self.key: (self.x[:1], self.y[:1])},
            (self.x[:1], self.y[:1]),
            rounds=assignment.round + 1,
            batch_size=assignment.batch_size,
            lr=assignment.lr,
            epochs=assignment.epochs,
            participation_probability=1.0 if assignment.trains else 0.0,
            seed=assignment.seed,
            classes=self.classes,
        )
        federation = SimulatedFederation(env, data, model=self.model, dtype=self.dtype)
        request = TrainRequest(
            assignment.run,
            assignment.round,
            model,
            assignment.update.rule(),
            frozenset(assignment.needs),
            None if assignment.outer is None else OuterLoss(assignment.outer),
            assignment.path_gradient,
            scales=(assignment.inside, assignment.after),
            class_weights=arrays.get("class_weights"),
        )
        return federation, request


def _array(arrays: Arrays, name: str) -> Tensor:
    if name not in arrays:
        raise InputError(f"the request comes without the array '{name}'.")
    return arrays[name]
