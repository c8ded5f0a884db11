"""One client, alone with its data. It answers every message with the numbers it would give in the simulation.

It is the simulation: an engine with a single client in it, made anew for every message. What depends on the
others (the scales of FedNova, class weights) comes with the message, so nothing is stored between messages and a
client may restart at any time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory
from fedunfold.data.federated import FederatedData
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, TrainInstruction
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.tasks.classification import Classification


@dataclass(frozen=True, eq=False)
class LocalClient:
    """A client with its samples and model; each method answers the message of its name.

    Attributes:
        client_id: Its name in the federation.
        x: Its samples, [n, …].
        y: Their classes, [n].
        classes: How many classes the federation has, also those that this client does not hold.
        model: Builds a fresh model.
        dtype: The type of the models.
    """

    client_id: str
    x: Tensor
    y: Tensor
    classes: int
    model: ModelFactory
    dtype: torch.dtype = torch.float32

    def register(self) -> ClientDescription:
        """What it says of itself once."""
        counts = torch.bincount(self.y, minlength=self.classes)
        return ClientDescription(self.client_id, tuple(counts.tolist()), tuple(self.x.shape[1:]))

    def train(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """A round of local training from w^(t), or, where it does not train, its losses at w^(t)."""
        federation, request = self._engine(instruction, arrays)
        (report,) = federation.train([request])
        metrics, outer = report.metrics, report.outer
        rows = {"updates": report.updates.rows, "gradients": metrics.gradients}
        replied = {name: found[0] for name, found in rows.items() if found is not None and len(found)}
        if outer.gradient is not None:
            replied["outer_gradient"] = outer.gradient
        reported = {"loss": metrics.loss, "start_loss": metrics.start_loss, "accuracy": metrics.accuracy}
        numbers = {name: float(value[0]) for name, value in reported.items() if value is not None}
        return ClientReply(numbers | {"outer_loss": outer.loss}, replied)

    def vjp(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """The same round backward from `arrays["adjoint"]`, with the minibatches it met."""
        federation, request = self._engine(instruction, arrays)
        adjoint = _array(arrays, "adjoint").to(self.dtype)
        (added,) = federation.vjp([request], [torch.tensor([True])], [adjoint[None]])
        return ClientReply({}, {"adjoint": added})

    def outer_loss(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """The outer loss of the final evaluation, and its gradient."""
        federation, request = self._engine(instruction, arrays)
        (found,) = federation.outer_loss([request])
        return ClientReply({"outer_loss": found.loss}, {"gradient": found.gradient})

    def measure(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """A round as in `train`, of which only the numbers are reported."""
        return ClientReply(self.train(instruction, arrays).metrics, {})

    def inner_products(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """⟨λ, w_k − w^(t)⟩ of the same round, for λ = `arrays["adjoint"]`."""
        update = self.train(instruction, arrays).arrays["updates"]
        return ClientReply({"inner_product": float(update @ _array(arrays, "adjoint").to(self.dtype))}, {})

    def evaluate(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """Mean loss and accuracy of a model on this client's own samples."""
        federation, request = self._engine(instruction, arrays)
        (found,) = federation.evaluate([request.model])
        return ClientReply({"loss": found.loss, "accuracy": found.score}, {})

    def _engine(self, instruction: TrainInstruction, arrays: Arrays) -> tuple[SimulatedFederation, TrainRequest]:
        model = _array(arrays, "model").to(self.dtype)
        data = FederatedData(
            (self.client_id,), self.x, self.y, (0, len(self.y)), self.x, self.y, Classification(self.classes)
        )
        row = self.x[:1], self.y[:1]  # stands for all of them where nothing is computed
        env = Environment.from_arrays(
            {self.client_id: row},
            row,
            rounds=instruction.round + 1,
            participation_probability=1.0 if instruction.trains else 0.0,
            classes=self.classes,
            **instruction.model_dump(include={"seed", "lr", "batch_size", "epochs"}),
        )
        federation = SimulatedFederation(env, data, model=self.model, dtype=self.dtype)
        return federation, instruction.request(model, arrays.get("class_weights"))


def _array(arrays: Arrays, name: str) -> Tensor:
    if name not in arrays:
        raise InputError(f"the message comes without the array '{name}'.")
    return arrays[name]
