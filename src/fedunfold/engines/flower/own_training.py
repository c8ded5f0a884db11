"""A Flower ClientApp whose own train function trains, while weights are learned and in runs alike.

The server of a learning sends the model as one vector, with an instruction. Here it becomes the message that the train
function knows from `FedAvg`: the module's state_dict under "arrays", and under "config" the round from 1
(`server-round`) and the learning rate (`lr`). What it replies becomes Δ_k = w_k − w^(t) again. Nothing is known of the
local steps: no derivative, and no loss along the way. So weights are learned to first order, for what the models
between rounds do.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedunfold.core.errors import InputError
from fedunfold.core.messages import Metric
from fedunfold.core.params import ParamLayout, flatten_model, load_model, place_model, seeded
from fedunfold.engines.flower.client import client_app, refuse_where_secure, registration_mod
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import ClientReply, TrainInstruction
from fedunfold.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    INSTRUCTION,
    flower_type,
    read_instruction,
    registration_record,
    reply_record,
)

Names = Mapping[Metric, str]


def own_training_app(
    open_client: Callable[[Context], LocalClient],
    *,
    metric_names: Names | None = None,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """A ClientApp for which weights can be learned, and that trains by the function it is given with `@app.train()`.

    That is a function as for `FedAvg`, of a torch module: it gets the module's state_dict and a config with
    `server-round` and `lr`, and replies with a state_dict and metrics. Messages of Flower's own strategies and of
    `WeightedStrategy` reach it as they are; its replies to those bring the client's id, which learned weights need.

    Args:
        open_client: Describes the client of a context: its id, its samples, on which models are evaluated, the task and
            the model.
        metric_names: Under which names the train function reports what a rule reads (loss, start_loss, accuracy).
        mods: Those of the app.

    >>> from torch import nn
    >>> import fedunfold as fu
    >>> def client(context):
    ...     x, y, k = torch.zeros(3, 4), torch.tensor([0, 1, 1]), context.node_config["partition-id"]
    ...     return LocalClient(f"client-{k}", x, y, fu.binary(), lambda: nn.Linear(4, 1))
    >>> app = own_training_app(client)
    >>> # then, as ever: @app.train() and @app.evaluate() before the app's functions
    """
    answers = client_app(open_client)
    registered = registration_mod(lambda context: open_client(context).register())

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        content = message.content
        if INSTRUCTION not in content.config_records.get(CONFIG, ()):
            return registered(message, context, call_next)
        if message.metadata.message_type != flower_type("train"):
            return answers(message, context)
        instruction, arrays = read_instruction(content)
        if not instruction.trains:
            return answers(message, context)
        client = open_client(context)
        refuse_where_secure(client, context)
        model = arrays["model"].to(client.dtype)
        module = place_model(seeded(client.model, 0, "shape"), model.device, client.dtype)
        load_model(module, model)
        reply = call_next(_as_from_fedavg(message, module, instruction), context)
        if reply.has_error():
            return reply
        try:
            found = _reply(reply.content, module, model, instruction, metric_names or {})
        except InputError as error:
            raise InputError(f"round {instruction.round}: client {client.client_id} {error}") from error
        return Message(reply_record(found), reply_to=message)

    app = ClientApp(mods=[mod, *mods])

    @app.query("register")
    def register(message: Message, context: Context) -> Message:
        description = replace(open_client(context).register(), own_training=True)
        return Message(registration_record(description), reply_to=message)

    app.query("outer_loss")(answers)
    return app


def _as_from_fedavg(message: Message, module: nn.Module, instruction: TrainInstruction) -> Message:
    """The message with the content that `FedAvg` gives one."""
    config = ConfigRecord({"server-round": instruction.round + 1, "lr": instruction.lr})
    given = copy.copy(message)
    given.content = RecordDict({ARRAYS: ArrayRecord(module.state_dict()), CONFIG: config})
    return given


def _reply(
    content: RecordDict, module: nn.Module, model: Tensor, instruction: TrainInstruction, names: Names
) -> ClientReply:
    """What the server of a learning expects, of what a train function replies; the module is overwritten."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise InputError(f"replies with {len(records)} array records in place of one")
    try:
        module.load_state_dict(records[0].to_torch_state_dict())
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(f"replies with arrays that are not its model's: {reason}") from error
    update = flatten_model(module).to(model) - model
    reported = {name: value for record in content.metric_records.values() for name, value in record.items()}
    numbers = {"outer_loss": 0.0}  # there is none along training
    for metric in instruction.required_metrics:
        if metric == "norm":
            numbers["norm"] = float(ParamLayout.of(module).params(update).norm())
            continue
        value = reported.get(name := names.get(metric, metric))
        if not isinstance(value, int | float):
            raise InputError(
                f"reports no number '{name}', which the rule requires; say under which name it does, by metric_names"
            )
        numbers[metric] = float(value)
    return ClientReply(numbers, {"updates": torch.clone(update)})
