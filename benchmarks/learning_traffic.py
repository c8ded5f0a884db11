"""Messages and bytes by which weights are learned over Flower: counted where they leave the server and come back."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedunfold.config import Environment, environment
from fedunfold.engines.flower import (
    client_app,
    client_from_environment,
    federation_from_environment,
    own_training_app,
)
from fedunfold.unfolding import Learning, learn

ENVIRONMENT = "digits-label-skew"
Log = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """A way to learn: whose training, and what for."""

    name: str
    outer: str
    adjoint: str = "first_order"
    own_training: bool = False


WAYS = (
    Way("our local training", "path"),
    Way("our local training", "final"),
    Way("our local training, exact adjoint", "path", "exact"),
    Way("the app's own training", "final", own_training=True),
    Way("the app's own training", "every-round", own_training=True),
)


@dataclass(frozen=True)
class Traffic:
    """What one outer step exchanges.

    Attributes:
        name: Whose training.
        outer: The outer loss.
        messages: To all clients together.
        sent: Bytes of their contents.
        received: Bytes of the replies' contents.
    """

    name: str
    outer: str
    messages: int
    sent: int
    received: int


@dataclass(frozen=True)
class Found:
    """All that was counted."""

    clients: int
    rounds: int
    entries: int
    rows: Sequence[Traffic]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class CountingGrid(Grid):
    """Messages go straight to a ClientApp of this process, and are counted."""

    def __init__(self, app: ClientApp, clients: int) -> None:
        self.app, self.clients = app, clients
        self.contexts = {k: Context(1, k, {"partition-id": k}, RecordDict(), {}) for k in range(clients)}
        self.replies: dict[str, Message] = {}
        self.messages = self.sent = self.received = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id = message.metadata.__dict__["_message_id"] = f"message-{self.messages}"
            reply = self.app(message, self.contexts[message.metadata.dst_node_id])
            reply.metadata.__dict__["_reply_to_message_id"] = id
            self.messages += 1
            self.sent += recorddict_to_proto(message.content).ByteSize()
            self.received += recorddict_to_proto(reply.content).ByteSize()
            self.replies[id] = reply
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> list[int]:
        return list(range(self.clients))

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("messages are made by their own constructor")


def measure_traffic(rounds: int, log: Log = lambda what: None) -> Found:
    """Learn for two outer steps and count what the second one exchanges."""
    for part in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, part, 1)  # which Flower sets where a run begins, and messages ask for
    env = environment(ENVIRONMENT).replace(rounds=rounds)
    rows, entries = [], 0
    for way in WAYS:
        log(f"{way.name}, {way.outer}")
        grid = CountingGrid(_app(env, own_training=way.own_training), len(env.clients))
        federation = federation_from_environment(grid, env)
        entries, counts = federation.layout.size, list[tuple[int, int, int]]()

        def note(_: object, grid: CountingGrid = grid, counts: list[tuple[int, int, int]] = counts) -> None:
            counts.append((grid.messages, grid.sent, grid.received))

        learning = Learning(iterations=2, outer=way.outer, adjoint=way.adjoint)  # type: ignore[arg-type]
        learn(federation, rounds, learning=learning, on_iteration=note)
        last, before = counts[-1], counts[-2]
        rows.append(Traffic(way.name, way.outer, *(a - b for a, b in zip(last, before, strict=True))))
    return Found(len(env.clients), rounds, entries, rows)


def traffic_page(found: Found) -> str:
    """What was counted, in Markdown."""
    size, rounds, clients = 4 * found.entries, found.rounds, found.clients
    lines = [
        "# Messages of an outer step",
        "",
        f"One outer step of learning weights over Flower: {clients} clients, T = {rounds} rounds, all clients in each,",
        f"a model of {found.entries} parameters, {size / 1000:.0f} kB. Counted by",
        "`python -m benchmarks learning-traffic` where messages leave the server and replies come back; bytes are",
        "those of their contents as Flower encodes them, without what the transport adds. In models: bytes over the",
        "size of the model, for one client.",
        "",
        "| who trains | outer loss | messages to a client | models to it | models from it | MB to all | MB from all |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        models = (f"{bytes_ / size / clients:.1f}" for bytes_ in (row.sent, row.received))
        megabytes = (f"{bytes_ / 1e6:.2f}" for bytes_ in (row.sent, row.received))
        per_client = f"{row.messages / clients:g}"
        lines.append(" | ".join(["| " + row.name, row.outer, per_client, *models, *megabytes]) + " |")
    lines += [
        "",
        f"A run by FedAvg takes {rounds} messages and {rounds} models each way, so that an outer step costs a run",
        "and a little, with `every-round` two runs.",
    ]
    return "\n".join(lines) + "\n"


def _app(env: Environment, *, own_training: bool) -> ClientApp:
    """The clients of the environment; those with a train function of their own send back what they get."""
    if not own_training:
        return client_app(lambda context: client_from_environment(env, context))
    app = own_training_app(lambda context: client_from_environment(env, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        content = RecordDict({"arrays": ArrayRecord(dict(arrays)), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return app
