"""Run as a program: a strategy aggregates the same replies a few times; prints seconds and bytes."""

import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

import fedunfold as fu
from benchmarks.subprocesses import resident
from fedunfold.engines.flower import WeightedStrategy

if TYPE_CHECKING:
    from flwr.serverapp import Grid

ROUNDS = 6
WIDTHS = (512, 512, 3, 3)
"""Shape of the arrays a model is made of, as of the last layers of a ResNet; the rest is one more."""


class Nodes:
    """What FedAvg asks a grid when it makes its messages."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.clients + 1))


def main(name: str, clients: int, entries: int) -> None:
    random = np.random.default_rng(0)

    def model() -> ArrayRecord:
        whole, rest = divmod(entries, int(np.prod(WIDTHS)))
        shapes = [*whole * [WIDTHS], (rest,)]
        return ArrayRecord({f"layer-{i}": Array(random.random(s, np.float32)) for i, s in enumerate(shapes)})

    begin, grid = model(), Nodes(clients)
    replies = [
        RecordDict({"arrays": model(), "metrics": MetricRecord({"num-examples": 10 + k})}) for k in range(clients)
    ]
    seconds, processor, of_rounds, in_all = [], [], [], []
    strategy, arrays, empty = made(name, clients), begin, resident("VmRSS")
    for t in range(1, ROUNDS + 1):
        asked = list(strategy.configure_train(t, arrays, ConfigRecord(), as_grid(grid)))
        messages = [Message(content, reply_to=message) for content, message in zip(replies, asked, strict=True)]
        for message, to in zip(messages, asked, strict=True):
            message.metadata.__dict__["_src_node_id"] = to.metadata.dst_node_id
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is now the present one
        began = time.perf_counter(), time.process_time()
        found, _ = strategy.aggregate_train(t, messages)
        seconds.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
        of_rounds.append(resident("VmHWM") - before)
        in_all.append(resident("VmHWM") - empty)
        assert found is not None
        arrays = found
    kept = resident("VmRSS") - empty
    # The first round is not typical: memory is asked of the system that later ones find.
    measured: dict[str, Any] = {"seconds": seconds[1:], "processor": processor[1:]}
    measured |= {"round": max(of_rounds), "all": max(*in_all, kept), "kept": kept}
    sys.stdout.write(json.dumps(measured))


def as_grid(nodes: Nodes) -> "Grid":
    found: Any = nodes
    return found  # type: ignore[no-any-return]


def made(name: str, clients: int) -> FedAvg:
    """The strategy of that name."""
    table = torch.full((ROUNDS, clients), 1 / clients, dtype=torch.float64)
    ids = tuple(f"node:{node}" for node in range(1, clients + 1))
    if name == "FedAvg":
        return FedAvg()
    if name == "pre-trained":
        return WeightedStrategy(fu.pretrained())
    if name == "pre-trained, drop":
        return WeightedStrategy(fu.pretrained(), absent="drop")
    return WeightedStrategy(
        fu.size() if name == "size" else fu.LearnedWeights(ids, table, torch.zeros(0), table[None], {})
    )


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for part in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, part, 1)  # which Flower sets where a run begins, and messages ask for
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
