"""A Flower ClientApp for a site: its verbs, and its part in secure sums. Nothing of a round is kept in between."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedunfold.core.errors import InputError
from fedunfold.engines.flower.local_client import LocalClient
from fedunfold.engines.flower.schema import Arrays, ClientDescription, ClientReply, TrainInstruction
from fedunfold.engines.flower.secagg.handlers import add_secagg_handlers
from fedunfold.engines.flower.wire import read_assignment, registration_record, reply_record

OpenSite = Callable[[Context], LocalClient]
Evaluate = Callable[[ArrayRecord, Context], tuple[float, float]]


def client_app(open_site: OpenSite) -> ClientApp:
    """An app that answers for the site that `open_site` finds for a context (its node-config says which).

    Where the node-config or the run's config says private=true it shows no vector of its own, but answers with single
    numbers and adds to secure sums; so no run can open a node that is to be private.

    >>> from fedunfold.engines.flower import client_app, site_of
    >>> app = client_app(lambda context: site_of("digits-label-skew", context))
    """
    app = ClientApp()

    add_registration(app, lambda context: open_site(context).register())
    add_secagg_handlers(app, open_site)

    def answer(message: Message, verb: Callable[[TrainInstruction, Arrays], ClientReply]) -> Message:
        return Message(reply_record(verb(*read_assignment(message.content))), reply_to=message)

    def openly(context: Context) -> LocalClient:
        site = open_site(context)
        if context.node_config.get("private") or context.run_config.get("private"):
            raise InputError(f"client '{site.key}' is private and shows no vector of its own; run with private=true.")
        return site

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, openly(context).train)

    @app.query("backprop")
    def backprop(message: Message, context: Context) -> Message:
        return answer(message, openly(context).backprop)

    @app.query("outer")
    def outer(message: Message, context: Context) -> Message:
        return answer(message, openly(context).outer)

    @app.query("measure")
    def measure(message: Message, context: Context) -> Message:
        return answer(message, open_site(context).measure)

    @app.query("inner")
    def inner(message: Message, context: Context) -> Message:
        return answer(message, open_site(context).inner)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, open_site(context).evaluate)

    return app


def add_registration(app: ClientApp, describe: Callable[[Context], ClientDescription]) -> None:
    """Let a client app of your own say who it is, when the server asks: its key, its samples by class.

    >>> from flwr.clientapp import ClientApp
    >>> from fedunfold.engines.flower import ClientDescription, introduce
    >>> app = ClientApp()
    >>> introduce(app, lambda context: ClientDescription("hospital-a", label_counts=(120, 80), features=(64,)))
    """

    @app.query("register")
    def register(message: Message, context: Context) -> Message:
        return Message(registration_record(describe(context)), reply_to=message)


def reporting(evaluate: Evaluate) -> Mod:
    """A mod for an ordinary client's train function: it adds to the reply what weighting rules ask for.

    `evaluate(arrays, context)` gives the mean loss and the accuracy of a model on the client's own training data.
    It is called with the model received, for `start_loss`, and with the one trained, for `accuracy`: what
    `dr(loss="start")` and `fedfa()` ask for.
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
