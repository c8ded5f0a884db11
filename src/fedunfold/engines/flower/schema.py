"""What is sent to one client and what it replies, in plain values: no network here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator
from torch import Tensor

from fedunfold.config import Environment
from fedunfold.config.fields import BatchSize
from fedunfold.core.control import Control
from fedunfold.core.errors import InputError
from fedunfold.core.messages import Broadcast, Metric, TrainRequest
from fedunfold.core.parts import LOCAL_OPTIMIZERS, OUTER_LOSSES, LocalOptimizer, OuterLoss, Part
from fedunfold.core.registry import Registry
from fedunfold.core.settings import Count, Natural, Settings, shown
from fedunfold.core.task import task_text as task_text
from fedunfold.data.arrays import Inputs
from fedunfold.io.limits import EPOCHS, ROUNDS

MessageType = Literal["register", "train", "vjp", "outer_loss", "evaluate", "measure", "inner_products"]
SumStage = Literal["advertise", "share", "mask", "confirm", "unmask"]
Arrays = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
"""The shape of a sample in each of a model's inputs; the name of an only one is empty."""
Kind = TypeVar("Kind", bound=Part)

EXTRA = "extra:"
"""What the names of a local optimiser's vectors come after in a message."""
SHARED_CONTROL, OWN_CONTROL = f"{EXTRA}control", f"{EXTRA}own-control"
"""The server's control variate, and the client's, which never leaves it: its app adds it to what was sent."""
CONTROL = "control"
"""The client's after the round, which its app takes out of the reply."""
OF_REQUEST = ("run", "round", "optimizer", "outer", "path_gradient", "curvature")
"""What an instruction says as the `TrainRequest` that it is made of does."""


def _received(registry: Registry[Kind], given: Any) -> Kind:
    """Make a part from its name and settings, as a client receives them; one that is made already stays as it is."""
    if isinstance(given, Part):
        return given  # type: ignore[return-value]  # the registry of the field says which kind
    if not (isinstance(given, dict) and isinstance(name := given.get("name"), str)):
        raise InputError(f"must be a name and settings, got {shown(given)}")
    if name not in registry.names():
        raise InputError(
            f"this client has no {registry.kind} {shown(name)}, which the server uses; install the package that "
            "provides it here too"
        )
    try:
        return registry.make(**given)
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # a factory may do anything with settings of the wrong type
        raise InputError(f"{registry.kind} {shown(name)} cannot be made: {error}") from error


Described = PlainSerializer(lambda part: part.describe())
Optimizer = Annotated[LocalOptimizer, PlainValidator(partial(_received, LOCAL_OPTIMIZERS)), Described]
Outer = Annotated[OuterLoss, PlainValidator(partial(_received, OUTER_LOSSES)), Described]


class TrainInstruction(Settings):
    """Everything a client needs for one round beside its data, the model and, if it has one, its control variate.

    Attributes:
        run: Names the randomness.
        round: t, from 0.
        seed: The federation's.
        lr: η.
        batch_size: B.
        epochs: E_k.
        optimizer: The local optimiser; on the wire its name and settings.
        required_metrics: What to report beside the update.
        outer: The outer loss, where one is wanted; on the wire its name and settings.
        path_gradient: Whether its gradient along local training is wanted too.
        curvature: Whether the backward pass counts the curvature of the training loss.
        trains: False for a client that counts as absent and only reports its losses at w^(t).
        step_scale: c_k, which depends on the other clients of the cohort.
        update_scale: The factor on w_k − w^(t), which does so too.
        control_round: The last round that its update entered, whose control variate it trains under, −1 before the
            first; None where it trains under none.
    """

    run: str
    round: Annotated[Natural, AfterValidator(ROUNDS.check)]
    seed: Natural
    lr: float = Field(gt=0)
    batch_size: BatchSize
    epochs: Annotated[Count, AfterValidator(EPOCHS.check)]
    optimizer: Optimizer
    required_metrics: tuple[Metric, ...] = ()
    outer: Outer | None = None
    path_gradient: bool = False
    curvature: bool = True
    trains: bool = True
    step_scale: float = 1.0
    update_scale: float = 1.0
    control_round: Annotated[int, Field(ge=-1)] | None = None

    @classmethod
    def of(cls, request: TrainRequest, env: Environment, **own: Any) -> "TrainInstruction":
        """What a client is to do at a server's request.

        Args:
            request: What is requested of the round.
            env: How clients train.
            **own: The fields that differ between clients.
        """
        common = {name: getattr(request, name) for name in OF_REQUEST}
        metrics = tuple(sorted(request.required_metrics))
        return cls(**common, required_metrics=metrics, seed=env.seed, lr=env.lr, batch_size=env.batch_size, **own)

    def request(self, model: Tensor, arrays: Arrays) -> TrainRequest:
        """The request again, for this client alone.

        Args:
            model: w^(t).
            arrays: What came with the instruction.
        """
        common = {name: getattr(self, name) for name in OF_REQUEST}
        extras = {name.removeprefix(EXTRA): array for name, array in arrays.items() if name.startswith(EXTRA)}
        sent = Broadcast(self.step_scale, self.update_scale, arrays.get("class_weights"), extras)
        control = None
        if self.control_round is not None:
            shared, own = arrays.get(SHARED_CONTROL, torch.zeros_like(model)), arrays[OWN_CONTROL]
            control = Control(shared.to(model), {0: own.to(model)})
        metrics = frozenset(self.required_metrics)
        return TrainRequest(model=model, required_metrics=metrics, broadcast=sent, control=control, **common)


@dataclass(frozen=True)
class ClientDescription:
    """What a client says of itself once, when it registers.

    Attributes:
        client_id: Its name in the federation.
        label_counts: How many samples of each of the task's groups, the classes, it has; without classes, of all.
        task: The task's name and settings, as `task_text` writes them.
        shapes: The shape of a sample.
        num_statistics: How many statistics it reports where it tests a model.
        own_training: Whether it trains by a function of its own, known by what it makes of a model alone.
        num_held_out: How many samples it tests models on without training on them; 0 where it tests on those it trains
            on.
    """

    client_id: str
    label_counts: tuple[int, ...]
    task: str = ""
    shapes: Shapes = field(default_factory=dict)
    num_statistics: int = 0
    own_training: bool = False
    num_held_out: int = 0

    @property
    def num_examples(self) -> int:
        """N_k."""
        return sum(self.label_counts)

    @property
    def num_tested(self) -> int:
        """How many samples it tests models on."""
        return self.num_held_out or self.num_examples


@dataclass(frozen=True)
class ClientReply:
    """A client's reply.

    Attributes:
        metrics: Numbers by name.
        arrays: Arrays by name.
    """

    metrics: Mapping[str, float]
    arrays: Arrays


def shapes_of(inputs: Inputs) -> Shapes:
    """The shape of a sample."""
    named = {"": inputs} if isinstance(inputs, Tensor) else inputs
    return {name: tuple(rows.shape[1:]) for name, rows in named.items()}


def shapes_text(shapes: Shapes) -> str:
    """Shapes in a message: of the only input, or of each by its name."""
    return ", ".join(f"{list(shape)} for '{name}'" if name else str(list(shape)) for name, shape in shapes.items())
