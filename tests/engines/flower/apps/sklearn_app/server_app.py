"""What runs at the server."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from tests.engines.flower.apps.results import save_result
from tests.engines.flower.apps.sklearn_app.task import create_model, get_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord(get_params(create_model()))
    strategy = FedAvg(min_available_nodes=3)
    rounds = int(context.run_config["num-server-rounds"])
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, timeout=60)
    save_result(result, str(context.run_config["folder"]))
