"""What secure sums cost: a private run of many clients, some of which drop out, beside an open one.

Messages go straight to the client app in this process, so that no network and no start of a process is in the seconds;
bytes are those of Flower's own encoding of every message. Clients compute one after the other; their mean is shown.
"""

import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.workload import federation, images
from fedunfold.config import Environment
from fedunfold.engines.flower import client_app, client_from_environment, federation_from_environment
from fedunfold.engines.flower.secagg import graph
from fedunfold.rules import size
from fedunfold.runs.system_info import machine
from fedunfold.training.loop import run_rounds

SAMPLES, EPOCHS = 60, 1
OPEN, NEIGHBOURS, COMPLETE = "open", "secure, neighbours", "secure, complete graph"
LAST_STEPS = ("train", "query.mask")
"""The messages amid which clients drop out: after they have begun, and before what they compute has come."""
Log = Callable[[str], None]


class CountingGrid(Grid):
    """Clients in this process; it counts what passes and how long clients take.

    Args:
        app: The clients' app.
        nodes: Their node-configs.
        lost: The nodes that drop out in every round.
    """

    def __init__(self, app: ClientApp, nodes: Mapping[int, dict[str, Any]], lost: frozenset[int]) -> None:
        self._app, self._nodes, self._lost = app, nodes, lost
        self._replies: dict[str, Message] = {}
        self._states: defaultdict[int, RecordDict] = defaultdict(RecordDict)
        self.messages, self.sent, self.received, self.seconds = 0, 0, 0, 0.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.messages += 1
            self.sent += _bytes(message)
            began = time.perf_counter()
            reply = self._answer(message)
            self.seconds += time.perf_counter() - began
            if not reply.has_error():
                self.messages += 1
                self.received += _bytes(reply)
            reply.metadata.__dict__["_reply_to_message_id"] = ids[-1]
            self._replies[ids[-1]] = reply
        return ids

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self._lost and message.metadata.message_type in LAST_STEPS:
            return Message(Error(1, "dropped out"), reply_to=message)
        return self._app(message, Context(1, node, self._nodes[node], self._states[node], {}))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(id) for id in message_ids if id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> list[int]:
        return list(self._nodes)

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError


@dataclass(frozen=True)
class SumCost:
    """What a round of a run costs, the mean over its rounds.

    Attributes:
        name: How updates are added up.
        neighbours: With how many others a client shares masks and secrets.
        messages: To clients and from them.
        sent: Bytes to one client.
        received: Bytes from one client.
        client: Seconds of one client.
        server: Seconds of the server.
    """

    name: str
    neighbours: int
    messages: float
    sent: float
    received: float
    client: float
    server: float


@dataclass(frozen=True)
class SumCosts:
    """All that was measured."""

    machine: Mapping[str, Any]
    images: str
    clients: int
    lost: int
    rounds: int
    entries: int
    rows: Sequence[SumCost]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_sums(clients: int, lost: int, rounds: int, log: Log = lambda what: None) -> SumCosts:
    """The same run openly, with secure sums among neighbours, and with all clients as neighbours."""
    env = federation([(SAMPLES, EPOCHS)] * clients, rounds)
    rows, entries = [], 0
    for name in (OPEN, NEIGHBOURS, COMPLETE):
        log(name)
        with tempfile.TemporaryDirectory() as folder, _complete(name == COMPLETE), _in_a_run():
            cost, entries = _measure(env, name, lost, Path(folder))
            rows.append(cost)
    return SumCosts(machine(), images(), clients, lost, rounds, entries, rows)


def _measure(env: Environment, name: str, lost: int, folder: Path) -> tuple[SumCost, int]:
    keys, secure = env.load().keys, name != OPEN
    configs = _node_configs(folder, keys) if secure else [{"client-id": key} for key in keys]
    app = client_app(lambda context: client_from_environment(env, context))
    grid = CountingGrid(app, dict(enumerate(configs, 1)), frozenset(range(1, lost + 1)))
    remote = federation_from_environment(grid, env, secure_aggregation=secure)
    before = grid.messages, grid.sent, grid.received, grid.seconds
    began = time.perf_counter()
    (result,) = run_rounds(remote, size(), env.rounds)
    whole = time.perf_counter() - began
    messages, sent, received, seconds = (
        now - then for now, then in zip((grid.messages, grid.sent, grid.received, grid.seconds), before, strict=True)
    )
    if int(result.participated.sum()) != env.rounds * (len(keys) - lost):
        raise RuntimeError(f"{name}: other clients took part than were to")
    neighbours = min(2 * graph.reach(len(keys)), len(keys) - 1) if secure else 0
    each = env.rounds * len(keys)
    cost = SumCost(
        name,
        neighbours,
        messages / env.rounds,
        sent / each,
        received / each,
        seconds / each,
        (whole - seconds) / env.rounds,
    )
    return cost, len(result.model)


@contextmanager
def _complete(whether: bool) -> Iterator[None]:
    """Have all clients be each other's neighbours, however many there are."""
    with patch.object(graph, "COMPLETE", 10**9 if whether else graph.COMPLETE):
        graph.reach.cache_clear()
        try:
            yield
        finally:
            graph.reach.cache_clear()


@contextmanager
def _in_a_run() -> Iterator[None]:
    """What Flower sets where a run begins, and messages ask for; without a word about clients that are to drop out."""
    log = logging.getLogger("fedunfold")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with patch.multiple(TaskIdentity, _task_id=1, _run_id=1, _node_id=1):
            yield
    finally:
        log.setLevel(level)


def _node_configs(folder: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Of clients that trust no server, with keys on the curve that Flower's own nodes have."""
    roster, configs = {}, []
    for key in keys:
        private = ec.generate_private_key(ec.SECP384R1())
        (folder / key).write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        roster[key] = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        (folder / f"{key}.json").touch()
        files = {"roster": "roster.json", "signing-key": key, "record": f"{key}.json"}
        found = {name: str(folder / file) for name, file in files.items()}
        configs.append({"client-id": key, "secure-aggregation": True, **found})
    (folder / "roster.json").write_text(json.dumps(roster))
    return configs


def _bytes(message: Message) -> int:
    return len(recorddict_to_proto(message.content).SerializeToString())


def sums_page(found: SumCosts) -> str:
    """What was measured, in Markdown."""
    lines = [
        "# What secure sums cost",
        "",
        f"Made by `python -m benchmarks secure`: a round of FedAvg with {found.clients} clients of {SAMPLES} samples,",
        f"{found.lost} of which drop out in every round before their update has come; a model of {found.entries}",
        f"parameters in single precision; the mean over {found.rounds} rounds.",
        "Messages go straight to the clients' app in one process: seconds have no network and no start of a process in",
        "them, and bytes are those of Flower's encoding. With all clients as neighbours the protocol is that of",
        "Bonawitz et al. 2017, whatever the number of clients; among neighbours it is as in",
        "[secure.md](../../secure.md).",
        "Both sign keys and survivors.",
        f"Machine: {found.machine['device']}, {found.machine['cores']} cores, with other work on it.",
        "",
        "| | neighbours | messages | kB to a client | kB from a client | s a client | s at the server |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        cells = (
            row.name,
            str(row.neighbours or "–"),
            f"{row.messages:.0f}",
            f"{row.sent / 1e3:.0f}",
            f"{row.received / 1e3:.0f}",
            f"{row.client:.3f}",
            f"{row.server:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
