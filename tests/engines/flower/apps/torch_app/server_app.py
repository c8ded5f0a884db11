"""What runs at the server."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from tests.engines.flower.apps.results import save_result
from tests.engines.flower.apps.torch_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(min_available_nodes=3)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=int(context.run_config["num-server-rounds"]),
        timeout=60,
    )
    save_result(result, str(context.run_config["folder"]))
