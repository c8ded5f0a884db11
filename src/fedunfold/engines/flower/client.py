"""A Flower ClientApp for a `LocalClient`: an answer to every message, and its part in secure sums."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.control import with_control
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, MessageType, TrainInstruction
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import read, to_record
from fedunfold.engines.flower.wire import (
    REGISTRATION,
    description_config,
    flower_type,
    read_instruction,
    registration_record,
    reply_record,
)

OpenClient = Callable[[Context], LocalClient]
Evaluate = Callable[[ArrayRecord, Context], tuple[float, float]]
SECURE = "secure-aggregation"
"""The setting of a node or a run under which a client shows no vector of its own."""
STATE = "fedunfold-sum"
"""Where a client's secrets are stored between the stages of the one sum it takes part in."""


def client_app(open_client: OpenClient) -> ClientApp:
    """An app that answers for a client.

    Where the node-config or the run's config says secure-aggregation=true it shows no vector of its own, but replies
    with single numbers and adds to secure sums; so no run can lay open a node that is to be secure.

    Args:
        open_client: Finds the client of a context; the node-config says which it is.

    >>> from fedunfold.engines.flower import client_app, client_from_environment
    >>> app = client_app(lambda context: client_from_environment("digits-label-skew", context))
    """
    app = ClientApp()

    _add_secagg_handlers(app, open_client)

    @app.query("register")
    def register(message: Message, context: Context) -> Message:
        return Message(registration_record(open_client(context).register()), reply_to=message)

    def openly(context: Context) -> LocalClient:
        client = open_client(context)
        refuse_where_secure(client, context)
        return client

    def handler(message_type: MessageType, find: OpenClient) -> ClientAppCallable:
        def handle(message: Message, context: Context) -> Message:
            answer: Callable[[TrainInstruction, Arrays], ClientReply] = getattr(find(context), message_type)
            instruction, arrays = read_instruction(message.content)
            reply = with_control(answer, instruction, arrays, context.state)
            return Message(reply_record(reply), reply_to=message)

        return handle

    app.train()(handler("train", openly))
    app.query("vjp")(handler("vjp", openly))
    app.query("outer_loss")(handler("outer_loss", openly))
    app.query("measure")(handler("measure", open_client))
    app.query("inner_products")(handler("inner_products", open_client))
    app.evaluate()(handler("evaluate", openly))
    return app


def refuse_where_secure(client: LocalClient, context: Context) -> None:
    """Refuse to show a vector of a client's own where it takes part in secure sums."""
    if context.node_config.get(SECURE) or context.run_config.get(SECURE):
        raise InputError(
            f"client '{client.client_id}' takes part in secure aggregation alone and shows no vector of its own; "
            f"run with {SECURE}=true."
        )


def registration_mod(describe: Callable[[Context], ClientDescription]) -> Mod:
    """A mod for an ordinary client's train function: its replies bring its id and how many samples it has.

    So a client is known by an id that outlives a restart, in the place of its node's, and counts with the samples it
    brings first. `FedAvg` and other strategies see nothing of it.

    Args:
        describe: Describes the client of a context; called for every train message.

    >>> from flwr.clientapp import ClientApp
    >>> from fedunfold.engines.flower import ClientDescription, registration_mod
    >>> app = ClientApp(mods=[registration_mod(lambda context: ClientDescription("hospital-a", (120, 80)))])
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == flower_type("train") and not reply.has_error():
            reply.content[REGISTRATION] = description_config(describe(context))
        return reply

    return mod


def report_metrics_mod(evaluate: Evaluate) -> Mod:
    """A mod for an ordinary client's train function: it adds to the reply what weighting rules require.

    Args:
        evaluate: Gives the mean loss and the accuracy of a model on the client's own training data, from its arrays
            and the context. It is called with the model received, for `start_loss`, and with the one trained, for
            `accuracy`: what `dr(loss="start")` and `fedfa()` require.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        received = next(iter(message.content.array_records.values()))
        start_loss, _ = evaluate(received, context)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = next(iter(reply.content.array_records.values()))
        _, accuracy = evaluate(trained, context)
        metrics = next(iter(reply.content.metric_records.values()))
        metrics.update({"start_loss": start_loss, "accuracy": accuracy})
        return reply

    return mod


def _add_secagg_handlers(app: ClientApp, open_client: OpenClient) -> None:
    """Let an app reply in all four stages of a secure sum; a new sum replaces what was left of another."""

    @app.query("advertise")
    def advertise(message: Message, context: Context) -> Message:
        secrets, keys = _member(context).advertise(read(message.content, protocol.SetupRequest))
        return _answer(message, context, secrets, to_record(keys))

    @app.query("share")
    def share(message: Message, context: Context) -> Message:
        secrets, shares = _member(context).share(_stored(context), read(message.content, protocol.KeyBroadcast))
        return _answer(message, context, secrets, to_record(shares))

    @app.query("mask")
    def mask(message: Message, context: Context) -> Message:
        delivery, client = read(message.content, protocol.ShareDelivery), open_client(context)
        kind, array = delivery.message_type, delivery.array
        reply: ClientReply = getattr(client, kind)(*read_instruction(message.content))
        if array not in reply.arrays:
            raise InputError(f"client '{client.client_id}' has no '{array}' to add up after {kind}.")
        vector = delivery.weight * reply.arrays[array].double().numpy()
        secrets, masked = SecAggClient(client.client_id).mask(_stored(context), delivery, vector)
        masked_reply = ClientReply(reply.metrics, {"masked": torch.from_numpy(masked.view("int64"))})
        return _answer(message, context, secrets, reply_record(masked_reply))

    @app.query("unmask")
    def unmask(message: Message, context: Context) -> Message:
        shares = _member(context).unmask(_stored(context), read(message.content, protocol.SurvivorList))
        del context.state[STATE]  # there is no second reply, with other survivors
        return Message(to_record(shares), reply_to=message)

    def _member(context: Context) -> SecAggClient:
        return SecAggClient(open_client(context).client_id)


def _answer(message: Message, context: Context, secrets: Secrets, content: RecordDict) -> Message:
    """The reply of a stage, whose secrets are stored for the next."""
    context.state[STATE] = protocol.to_config(secrets)
    return Message(content, reply_to=message)


def _stored(context: Context) -> Secrets | None:
    return protocol.from_config(context.state.config_records[STATE], Secrets) if STATE in context.state else None
