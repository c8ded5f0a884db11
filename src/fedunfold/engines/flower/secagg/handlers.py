"""How a Flower ClientApp takes part in secure sums."""

from collections.abc import Callable

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.engines.flower.secagg import protocol
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import read, to_record
from fedunfold.engines.flower.wire import read_instruction, reply_record

STATE = "fedunfold-sum"
"""Where a client's secrets are stored between the stages of the one sum it takes part in."""


def add_secagg_handlers(app: ClientApp, open_client: Callable[[Context], LocalClient]) -> None:
    """Let an app reply in all four stages; a new sum replaces what was left of another.

    Args:
        app: The app.
        open_client: Finds the client of a context.
    """

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
