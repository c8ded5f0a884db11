"""One client, alone with its data. It answers every message with the numbers it would give in the simulation.

It is the simulation: an engine with a single client in it, made anew for every message. What depends on the
others (the scales of FedNova, class weights) comes with the message, so nothing is stored between messages and a client
may restart at any time. Where it trains under a control variate, its app stores that (`control`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.config.fields import Client
from fedunfold.core.errors import InputError
from fedunfold.core.messages import TrainRequest
from fedunfold.core.params import ModelFactory, ParamLayout, place_model, seeded
from fedunfold.core.task import Task
from fedunfold.data.arrays import Inputs, call_model, cast, take, tensors
from fedunfold.data.config import MemorySource
from fedunfold.data.federated import FederatedData
from fedunfold.data.partitions import GivenPartition
from fedunfold.engines.flower.schema import (
    CONTROL,
    Arrays,
    ClientDescription,
    ClientReply,
    TrainInstruction,
    shapes_of,
    shapes_text,
    task_text,
)
from fedunfold.engines.simulation import SimulatedFederation


@dataclass(frozen=True, eq=False)
class LocalClient:
    """A client with its samples and model; each method answers the message of its name.

    Attributes:
        client_id: Its name in the federation.
        inputs: Its samples, one tensor [n, …] or several by name.
        y: Their targets, [n, …].
        task: What the federation trains for; of a classification, all classes count, also those not held here.
        model: Builds a fresh model.
        dtype: The type of the models.
        held_out: Samples and targets that it does not train on; where it has some, it tests models on these.

    >>> from torch import nn
    >>> from fedunfold.tasks import survival
    >>> x, y = torch.zeros(3, 8), torch.tensor([[5.0, 1.0], [7.0, 0.0], [2.0, 1.0]])
    >>> LocalClient("hospital-a", x, y, survival(), lambda: nn.Linear(8, 1)).register().task
    'survival:ties=efron'
    """

    client_id: str
    inputs: Inputs
    y: Tensor
    task: Task
    model: ModelFactory
    dtype: torch.dtype = torch.float32
    held_out: tuple[Inputs, Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", self._checked(self.inputs, self.y, f"client {self.client_id}"))
        if self.held_out is not None:
            inputs, y = self.held_out
            whose = f"what client {self.client_id} holds out"
            object.__setattr__(self, "held_out", (inputs, self._checked(inputs, y, whose)))
            if shapes_of(inputs) != shapes_of(self.inputs):
                raise InputError(
                    f"{whose} has rows of shape {shapes_text(shapes_of(inputs))}, it trains on "
                    f"{shapes_text(shapes_of(self.inputs))}; make them alike."
                )

    def _checked(self, inputs: Inputs, y: Tensor, whose: str) -> Tensor:
        """Targets in the task's type, one for each sample."""
        targets = self.task.check_targets(y.numpy(), f"y of {whose}")
        if odd := [len(rows) for rows in tensors(inputs) if len(rows) != len(targets)]:
            raise InputError(f"{whose} has {odd[0]} samples for {len(targets)} targets; give one each.")
        return torch.from_numpy(targets)

    @property
    def num_params(self) -> int:
        """d, how many entries a model of its own has."""
        return ParamLayout.of(seeded(self.model, 0, "shape")).size

    @torch.no_grad()
    def register(self) -> ClientDescription:
        """What it says of itself once."""
        groups = torch.bincount(self.task.groups(self.y), minlength=self.task.num_groups)
        first = self.y[:1]
        module = place_model(seeded(self.model, 0, "shape"), first.device, self.dtype).eval()
        outputs = call_model(module, cast(take(self.inputs, slice(1)), first.device, self.dtype))
        statistics = self.task.statistics(self.task.check_outputs(outputs, first), first)
        counts: tuple[int, ...] = tuple(groups.tolist())
        return ClientDescription(
            self.client_id,
            counts,
            task_text(self.task),
            shapes_of(self.inputs),
            num_statistics=len(statistics),
            num_held_out=0 if self.held_out is None else len(self.held_out[1]),
        )

    def train(self, instruction: TrainInstruction, arrays: Arrays) -> ClientReply:
        """A round of local training from w^(t), or, where it does not train, its losses at w^(t)."""
        federation, request = self._engine(instruction, arrays)
        (report,) = federation.train([request])
        metrics, outer = report.metrics, report.outer
        rows = {"updates": report.updates.rows, "gradients": metrics.gradients, CONTROL: metrics.controls}
        replied = {name: found[0] for name, found in rows.items() if found is not None and len(found)}
        if outer.gradient is not None:
            replied["outer_gradient"] = outer.gradient
        single = ("loss", "start_loss", "accuracy", "norm")
        reported = {name: getattr(metrics, name) for name in single}
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
        """The task's statistics and the mean loss of a model on what this client holds out, or else trains on."""
        federation, request = self._engine(instruction, arrays)
        statistics, loss = federation.statistics(request.model)
        return ClientReply({"loss": loss}, {"statistics": statistics})

    def _engine(self, instruction: TrainInstruction, arrays: Arrays) -> tuple[SimulatedFederation, TrainRequest]:
        model = _array(arrays, "model").to(self.dtype)
        rows = self.inputs, self.y
        tested = self.held_out or rows
        data = FederatedData((self.client_id,), *rows, (0, len(self.y)), *tested, self.task)
        probability = 1.0 if instruction.trains else 0.0
        env = Environment(
            name=self.client_id,
            rounds=instruction.round + 1,
            task=self.task,
            data=MemorySource(data=data),
            partition=GivenPartition(),
            clients=(Client(key=self.client_id, epochs=instruction.epochs, participation_probability=probability),),
            **instruction.model_dump(include={"seed", "lr", "batch_size"}),
        )
        federation = SimulatedFederation(env, model=self.model, dtype=self.dtype)
        return federation, instruction.request(model, arrays)


def _array(arrays: Arrays, name: str) -> Tensor:
    if name not in arrays:
        raise InputError(f"the message comes without the array '{name}'.")
    return arrays[name]
