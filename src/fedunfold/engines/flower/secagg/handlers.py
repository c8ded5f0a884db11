"""How a Flower ClientApp takes part in secure sums."""

from collections.abc import Callable

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import ClientReply
from fedunfold.engines.flower.secagg.client import SecAggClient, Secrets
from fedunfold.engines.flower.secagg.protocol import (
    KeyBroadcast,
    SetupRequest,
    ShareDelivery,
    SurvivorList,
    from_config,
    read,
    to_config,
    to_record,
)
from fedunfold.engines.flower.wire import read_assignment, reply_record

STATE = "fedunfold-sum"
"""Where a client's secrets are kept between the stages of the one sum it takes part in."""


def add_secagg_handlers(app: ClientApp, open_site: Callable[[Context], LocalClient]) -> None:
    """Let an app answer in all four stages; a new sum makes it forget what was left of another."""

    @app.query("advertise")
    def advertise(message: Message, context: Context) -> Message:
        secrets, keys = _member(context).advertise(read(message.content, SetupRequest))
        _keep(context, secrets)
        return Message(to_record(keys), reply_to=message)

    @app.query("share")
    def share(message: Message, context: Context) -> Message:
        secrets, shares = _member(context).share(_kept(context), read(message.content, KeyBroadcast))
        _keep(context, secrets)
        return Message(to_record(shares), reply_to=message)

    @app.query("mask")
    def mask(message: Message, context: Context) -> Message:
        delivery, site = read(message.content, ShareDelivery), open_site(context)
        verbs = {"train": site.train, "backprop": site.backprop, "outer": site.outer}
        reply = verbs[delivery.verb](*read_assignment(message.content))
        if delivery.array not in reply.arrays:
            raise InputError(f"client '{site.key}' has no '{delivery.array}' to add up after {delivery.verb}.")
        vector = delivery.weight * reply.arrays[delivery.array].double().numpy()
        secrets, masked = SecAggClient(site.key).mask(_kept(context), delivery, vector)
        _keep(context, secrets)
        answer = ClientReply(reply.metrics, {"masked": torch.from_numpy(masked.view("int64"))})
        return Message(reply_record(answer), reply_to=message)

    @app.query("unmask")
    def unmask(message: Message, context: Context) -> Message:
        secrets = _kept(context)
        revealed = _member(context).unmask(secrets, read(message.content, SurvivorList))
        del context.state[STATE]  # there is no second answer, with other survivors
        return Message(to_record(revealed), reply_to=message)

    def _member(context: Context) -> SecAggClient:
        return SecAggClient(open_site(context).key)


def _keep(context: Context, secrets: Secrets) -> None:
    context.state[STATE] = to_config(secrets)


def _kept(context: Context) -> Secrets | None:
    return from_config(context.state.config_records[STATE], Secrets) if STATE in context.state else None
