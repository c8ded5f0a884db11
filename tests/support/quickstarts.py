"""The apps of tests/engines/flower/apps under several strategies, each two lines away from FedAvg.

Run as a program: all of them over one of Flower's own simulations, by Ray; the results go into a folder.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from tests.engines.flower.apps.sklearn_app.client_app import app as sklearn_clients
from tests.engines.flower.apps.torch_app.client_app import app as torch_clients

CLIENTS: dict[str, ClientApp] = {"torch_app": torch_clients, "sklearn_app": sklearn_clients}
FEDAVG = "from flwr.serverapp.strategy import FedAvg", "FedAvg("
UNFOLDED = (
    "import fedunfold as fu, fedunfold.rules.unfolded as unfolded;"
    " zeros = {name: 0 * value for name, value in unfolded.initial_parameters(8, 0).items()}"
)
STRATEGIES = {
    "FedAvg": FEDAVG,
    "size": ("import fedunfold as fu", "fu.WeightedStrategy(fu.size(), "),
    "unfolded": (UNFOLDED, "fu.WeightedStrategy(unfolded.UnfoldedRule(zeros), "),
}
"""The line that imports the strategy, and the beginning of its call."""
APPS = Path(__file__).parents[1] / "engines" / "flower" / "apps"
NUM_NODES, ROUNDS = 4, 3


def server_source(app: str, strategy: tuple[str, str] = FEDAVG) -> str:
    """The source of an app's server with another strategy in the place of FedAvg."""
    text = (APPS / app / "server_app.py").read_text(encoding="utf-8")
    for old, new in zip(FEDAVG, strategy, strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def run_app(app: str, strategy: tuple[str, str], grid: Grid, folder: Path, rounds: int = ROUNDS) -> None:
    """Run an app's server on a grid; the result is in the folder."""
    module: Any = ModuleType(f"{app}.server_app")
    exec(compile(server_source(app, strategy), module.__name__, "exec"), module.__dict__)  # noqa: S102  (the app's own)
    config: dict[str, Any] = {"num-server-rounds": rounds, "folder": str(folder)}
    module.main(grid, Context(1, 1, {}, None, config))  # type: ignore[arg-type]


class BothApps(ClientApp):
    """Messages go to the app whose model they hold: one start of Ray is enough for both."""

    def __call__(self, message: Message, context: Context) -> Message:
        of_torch = "conv.weight" in message.content.array_records["arrays"]
        return CLIENTS["torch_app" if of_torch else "sklearn_app"](message, context)


def main(folder: str) -> None:
    from flwr.simulation import run_simulation  # brings Ray, which those who import this file do not need

    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        for app in CLIENTS:
            for name, strategy in STRATEGIES.items():
                run_app(app, strategy, grid, Path(folder, app, name))

    # One worker: on few cores a second one takes longer to start than it saves.
    ray: dict[str, Any] = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}}
    run_simulation(server, BothApps(), NUM_NODES, backend_config=ray)


if __name__ == "__main__":
    main(*sys.argv[1:])
