"""What runs at the server."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedunfold as fu
from fedunfold.engines.flower import FederationConfig, federation_from_config
from fedunfold.unfolding import learn
from tests.engines.flower.apps.results import save_result
from tests.engines.flower.apps.torch_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    rounds = int(context.run_config["num-server-rounds"])
    config = FederationConfig(
        client_ids=tuple(f"client-{k}" for k in range(4)),
        task=fu.classification(10),
        rounds=rounds,
        batch_size=16,
        lr=0.1,
    )
    clients = federation_from_config(grid, config, model=Net)
    weights = learn(clients, rounds, learning=fu.Learning(outer="every-round", iterations=5))
    strategy = fu.WeightedStrategy(weights, min_available_nodes=3)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=rounds,
        timeout=60,
    )
    save_result(result, str(context.run_config["folder"]))
