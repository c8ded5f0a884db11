"""Run as a program: Flower's own FedAvg and our strategy in its place, in turn over one Ray simulation of the standard
work; writes down the seconds of every round."""

import json
import os
import sys
import time
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedunfold.config import Environment

ROUNDS = 6
"""Rounds of a run; the first is not counted: Ray starts its workers then, and our strategy registers the clients."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@lru_cache
def environment() -> "Environment":
    """Made once in every process of Ray's."""
    from benchmarks.workload import STANDARD, federation

    return federation(STANDARD)


def main(repeats: int, file: Path) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from fedunfold.engines.flower import WeightedStrategy

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        import torch
        from torch.nn.functional import cross_entropy

        from benchmarks import baselines
        from benchmarks.flower_simulation import environment

        torch.set_num_threads(1)
        env, round = environment(), message.content.config_records["config"]["server-round"]
        assert isinstance(round, int)
        model = baselines.model(env, "trial-0")
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=env.lr)
        k = int(context.node_config["partition-id"])
        for x, y in baselines.minibatches(env, k, "trial-0", round - 1):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x), y))
            optimizer.step()
        metrics = MetricRecord({"num-examples": env.load().sizes[k]})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        import torch

        from benchmarks import baselines
        from fedunfold.core.params import flatten_model

        env, ended = environment(), list[float]()

        def tested(t: int, arrays: ArrayRecord) -> MetricRecord:
            model, data = baselines.model(env, "trial-0"), env.load()
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = float((model(data.x_test).argmax(1) == data.y_test).float().mean())
            ended.append(time.perf_counter())
            return MetricRecord({"accuracy": accuracy})

        def flat(arrays: ArrayRecord) -> "Tensor":
            return torch.cat([part.flatten() for part in arrays.to_torch_state_dict().values()])

        start = ArrayRecord(baselines.model(env, "trial-0").state_dict())
        expected = flatten_model(baselines.plain_loop(env.replace(rounds=ROUNDS)))
        seconds: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, strategy in (("FedAvg", FedAvg), ("WeightedStrategy", WeightedStrategy)):
                ended.clear()
                result = strategy(fraction_evaluate=0.0).start(grid, start, num_rounds=ROUNDS, evaluate_fn=tested)
                # A round whose clients all failed is fast, and Flower continues without a word.
                missed = float((flat(result.arrays) - expected).norm() / (expected - flat(start)).norm())
                if missed > 0.05:  # rounding alone, where it turns a unit on or off, can make it one in a hundred
                    raise RuntimeError(
                        f"Flower's clients have missed the plain loop's model by {missed:.0%} of the way."
                    )
                # The first test is of the initial model.
                seconds.setdefault(name, []).extend(b - a for a, b in pairwise(ended[1:]))
        file.write_text(json.dumps(seconds))

    run_simulation(server, client, num_supernodes=5, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    os.environ.update(QUIET)
    main(int(sys.argv[1]), Path(sys.argv[2]))
