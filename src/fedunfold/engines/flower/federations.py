"""Clients and servers, for two kinds of federations.

Those of an environment whose data can be loaded are for simulations, tests and the example. Those with custom data have
an .npz beside every SuperNode, and a server that sees none of them. Its array y has the targets; x is what the model
reads, or, where there is no x, all other arrays are, by their names.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid
from numpy.typing import ArrayLike
from pydantic import AfterValidator, Field
from torch import Tensor

from fedunfold.config import Environment, ModelSpec, environment
from fedunfold.config.fields import BatchSize, Client, Rounds, SamplerName, TaskField
from fedunfold.config.model import Model, model_factory
from fedunfold.core.errors import InputError
from fedunfold.core.params import ModelFactory
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.core.task import Task
from fedunfold.data.arrays import Arrays, Inputs, all_inputs, as_array, take
from fedunfold.data.config import MemorySource
from fedunfold.data.datasets import in_memory
from fedunfold.data.federated import FederatedData
from fedunfold.data.npz import read_npz
from fedunfold.data.partitions import GivenPartition
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Shapes, shapes_of, shapes_text
from fedunfold.engines.flower.secure_server import SecureFederation
from fedunfold.engines.flower.server import RemoteFederation
from fedunfold.engines.flower.transport import FlowerTransport
from fedunfold.engines.simulation import SimulatedFederation
from fedunfold.io.limits import CLASSES, EPOCHS

Samples = str | Path | tuple[Arrays, ArrayLike]
"""Where samples are: an .npz, or here as inputs x and targets y."""
KINDS = "uifb"
"""The numpy kinds of a client's arrays: numbers, and masks of True and False."""


def client_from_environment(
    env: Environment | str | Path,
    context: Context,
    dtype: torch.dtype = torch.float32,
    *,
    model: ModelFactory | None = None,
) -> LocalClient:
    """The client of an environment that a node is.

    Args:
        env: The environment.
        context: Its node-config says which client it is, by `client-id` or by `partition-id`.
        dtype: The type of the models.
        model: Builds a fresh model; by default the environment's own.
    """
    env = environment(env)
    data = env.load()
    chosen = context.node_config.get("client-id")
    if chosen is None:
        number = context.node_config.get("partition-id")
        if not (isinstance(number, int) and 0 <= number < len(data.keys)):
            raise InputError(f"node-config needs client-id=… with one of {', '.join(data.keys[:5])}, ….")
        chosen = data.keys[number]
    chosen = str(chosen)  # Flower reads client-id=2 as a number
    if chosen not in data.keys:
        raise InputError(f"client '{chosen}' is not in the environment; its clients are {', '.join(data.keys[:5])}.")
    inputs, y = _rows_of(data, chosen)
    kept, build = env.load_held_out(), model or _default_model(env.model, data)
    held_out = None if kept is None else _rows_of(kept, chosen)
    return LocalClient(chosen, inputs, y, data.task, build, dtype, held_out if held_out and len(held_out[1]) else None)


def _rows_of(data: FederatedData, client_id: str) -> tuple[Inputs, Tensor]:
    """A client's samples and targets."""
    k = data.keys.index(client_id)
    rows = slice(data.offsets[k], data.offsets[k + 1])
    return take(in_memory(data.inputs), rows), data.y[rows]


def federation_from_environment(
    grid: Grid,
    env: Environment | str | Path,
    *,
    model: ModelFactory | None = None,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    registration_timeout: float = 300.0,
    secure_aggregation: bool = False,
) -> RemoteFederation:
    """An environment's clients behind a grid, tested on the environment's test set; the server has its server data too.

    Args:
        grid: Flower's grid.
        env: The environment.
        model: Builds a fresh model, as at the clients; by default the environment's own.
        dtype: The type of the models.
        timeout: Seconds a client may take to reply.
        registration_timeout: Seconds all clients may take to register.
        secure_aggregation: Whether the server is to see sums of the clients' vectors only.
    """
    env = environment(env)
    tester = _tester(env, model, dtype)
    client_ids = [client.key for client in env.clients]
    transport = FlowerTransport(grid, client_ids, timeout=timeout, registration_timeout=registration_timeout)
    build = model or _default_model(env.model, tester.data)
    kind = SecureFederation if secure_aggregation else RemoteFederation
    return kind(transport, env, build, tester.evaluate, dtype=dtype, server_data=tester.server_data)


def _not_too_many_classes(task: Task) -> Task:
    CLASSES.check(task.num_groups)
    return task


class FederationConfig(Settings):
    """What server and clients have to agree on beforehand.

    Attributes:
        client_ids: Who is in the federation.
        task: What is trained for, such as `classification(3)` or `regression()`.
        rounds: T.
        batch_size: B.
        lr: η.
        epochs: E_k, the same for all.
        model: What is trained; any other model is given to the functions below.
        clients_per_round: C, how many clients are sampled for a round; None for all.
        client_sampler: How they are sampled.
        seed: Of all randomness.
        class_names: The classes in the order of their numbers.
    """

    client_ids: tuple[str, ...] = Field(min_length=1)
    task: Annotated[TaskField, AfterValidator(_not_too_many_classes)]
    rounds: Rounds
    batch_size: BatchSize
    lr: float = Field(gt=0)
    epochs: Annotated[Count, AfterValidator(EPOCHS.check)] = 1
    model: ModelSpec = ModelSpec()
    clients_per_round: Count | None = None
    client_sampler: SamplerName = "uniform"
    seed: Natural = 0
    class_names: Annotated[tuple[str, ...], Field(min_length=2)] | None = None


def client_from_npz(
    path: str | Path,
    client_id: str,
    config: FederationConfig,
    dtype: torch.dtype = torch.float32,
    *,
    held_out: str | Path | None = None,
    model: ModelFactory | None = None,
) -> LocalClient:
    """The client whose samples are in a file.

    Args:
        path: An .npz with x[n, …], or several inputs under names of their own, and targets y[n, …]; where x is one
            array, uint8 counts as image bytes and becomes x/255.
        client_id: Its name in the federation.
        config: The federation.
        dtype: The type of the models.
        held_out: Another file, of samples that it does not train on but tests models on.
        model: Builds a fresh model; by default the federation's.
    """
    if client_id not in config.client_ids:
        raise InputError(f"client '{client_id}' is not one of this federation's: {', '.join(config.client_ids)}.")
    try:
        inputs, y = _samples(path, config.task)
        kept = None if held_out is None else _samples(held_out, config.task)
        build = model or _default_model(config.model, _stand_in((client_id,), shapes_of(inputs), config.task))
    except InputError as error:
        raise InputError(f"client {client_id}: {error}") from error
    return LocalClient(client_id, inputs, y, config.task, build, dtype, kept)


def federation_from_config(
    grid: Grid,
    config: FederationConfig,
    test: Samples | None = None,
    *,
    server_data: Samples | None = None,
    model: ModelFactory | None = None,
    dtype: torch.dtype = torch.float32,
    timeout: float = 60.0,
    registration_timeout: float = 300.0,
    secure_aggregation: bool = False,
) -> RemoteFederation:
    """The clients of a federation behind a grid.

    Args:
        grid: Flower's grid.
        config: The federation.
        test: (x, y) to test models on, or an .npz as the clients have them, beside the server; without one, models are
            tested by the clients, each on what it holds out, or else on its own samples.
        server_data: The same of rows that a rule such as fedlaw reads at the server.
        model: Builds a fresh model, as at the clients; by default the federation's.
        dtype: The type of the models.
        timeout: Seconds a client may take to reply.
        registration_timeout: Seconds all clients may take to register.
        secure_aggregation: Whether the server is to see sums of the clients' vectors only.
    """
    # A wrong file is better found before the wait.
    given = {"the test set": test, "the server's data": server_data}
    tested, held = (None if rows is None else _samples(rows, config.task, name) for name, rows in given.items())
    transport = FlowerTransport(grid, config.client_ids, timeout=timeout, registration_timeout=registration_timeout)
    first = transport.registrations()[0]
    shapes = first.shapes
    if secure_aggregation and first.own_training:
        raise InputError(
            f"client {first.client_id} trains by a function of its own and shows its update; "
            "leave out secure aggregation."
        )
    for (name, source), found in zip(given.items(), (tested, held), strict=True):
        if found is not None and shapes_of(found[0]) != shapes:
            about = source if isinstance(source, str | Path) else name
            raise InputError(
                f"{about} has rows of shape {shapes_text(shapes_of(found[0]))}, the clients have "
                f"{shapes_text(shapes)}; make them alike."
            )
    data = replace(_stand_in(config.client_ids, shapes, config.task, tested), server=held)
    env = Environment(
        name="custom-data",
        data=MemorySource(data=data),
        partition=GivenPartition(),
        clients=tuple(Client(key=client_id, epochs=config.epochs) for client_id in config.client_ids),
        **{name: value for name, value in config if name not in ("client_ids", "epochs")},
    )
    build = model or _default_model(config.model, data)
    own = SimulatedFederation(env, model=build, dtype=dtype) if tested or held else None
    more: dict[str, Any] = {} if own is None else {"server_data": own.server_data}
    kind = SecureFederation if secure_aggregation else RemoteFederation
    return kind(transport, env, build, own.evaluate if own and tested else None, dtype=dtype, **more)


def _stand_in(
    client_ids: tuple[str, ...], shapes: Shapes, task: Task, tested: tuple[Inputs, Tensor] | None = None
) -> FederatedData:
    """Data of clients whose samples are not here: two rows of the test set stand for each, or of zeros, since a model
    with a normalisation is refused for one."""
    zeros = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
    inputs, y = tested or (zeros.get("", zeros), torch.zeros(1, dtype=torch.int64))
    row, offsets = torch.zeros(2 * len(client_ids), dtype=torch.int64), range(0, 2 * len(client_ids) + 1, 2)
    return FederatedData(client_ids, take(inputs, row), y[row], tuple(offsets), inputs, y, task)


def _default_model(spec: Model, data: FederatedData) -> ModelFactory:
    return model_factory(spec, data.features, data.task.num_outputs)


@lru_cache(maxsize=1)
def _tester(env: Environment, model: ModelFactory | None, dtype: torch.dtype) -> SimulatedFederation:
    return SimulatedFederation(env, model=model, dtype=dtype)


def _samples(source: Samples, task: Task, owner: str = "") -> tuple[Inputs, Tensor]:
    """Inputs and targets of a file, or as they are given, checked."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        name, (x, y) = str(path), _read_samples(path)
    else:
        name, (x, y) = owner, source
    keep_integers = task.keeps_integers or isinstance(x, Mapping)
    (rows,) = all_inputs({f"x in {name}": x}, keep_integers=keep_integers)
    inputs = {key: torch.from_numpy(array) for key, array in rows.items()}
    count, targets = len(next(iter(rows.values()))), as_array(y, f"y in {name}")
    if targets.shape[:1] != (count,):
        raise InputError(f"y in {name} has shape {targets.shape} but its x has {count} rows; give one target a row.")
    return inputs.get("", inputs), torch.from_numpy(task.check_targets(targets, f"y in {name}"))


def _read_samples(path: Path) -> tuple[Arrays, ArrayLike]:
    """x and y of a file; where it has no x, all other arrays by their names."""
    found = read_npz(path, ["y"], optional=["x"], kinds=KINDS)
    if "x" in found:
        return found["x"], found["y"]
    others = {name: array for name, array in read_npz(path, kinds=KINDS).items() if name != "y"}
    if not others:
        raise InputError(f"{path} has no x, only y; add what the model reads.")
    return others, found["y"]
