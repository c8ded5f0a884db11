"""A Flower ClientApp for a `LocalClient`: an answer to every message, and its part in secure sums."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.control import with_control
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, MessageType, TrainInstruction
from fedunfold.engines.flower.secure_client import SECURE, OpenClient, Roster, add_secagg_handlers
from fedunfold.engines.flower.wire import (
    REGISTRATION,
    description_config,
    flower_type,
    read_instruction,
    registration_record,
    reply_record,
)

Evaluate = Callable[[ArrayRecord, Context], tuple[float, float]]


def client_app(open_client: OpenClient, roster: Roster | None = None) -> ClientApp:
    """An app that answers for a client.

    Where the node-config or the run's config says secure-aggregation=true it shows no vector of its own, but replies
    with single numbers and adds to secure sums; so no run can lay open a node that is to be secure.

    Args:
        open_client: Finds the client of a context; the node-config says which it is.
        roster: Every site's public key by its name, without which no keys of others are accepted; by default the
            node-config names a file with it (docs/secure.md).

    >>> from fedunfold.engines.flower import client_app, client_from_environment
    >>> app = client_app(lambda context: client_from_environment("digits-label-skew", context))
    """
    app = ClientApp()

    add_secagg_handlers(app, open_client, roster)

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
