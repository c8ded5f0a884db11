"""The commands. What they need is imported when they run, so that `--help` answers at once."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedunfold.cli import Stopped
from fedunfold.cli.benchmark import benchmark
from fedunfold.cli.commands import CommandGroup
from fedunfold.cli.compare import compare, demo
from fedunfold.cli.data import app as data
from fedunfold.cli.env import app as environments
from fedunfold.cli.export import export
from fedunfold.cli.learn import learn
from fedunfold.cli.predict import predict
from fedunfold.cli.pretrain import pretrain
from fedunfold.cli.repeat import repeat
from fedunfold.cli.report import report
from fedunfold.cli.reproduce import reproduce
from fedunfold.cli.run import run
from fedunfold.cli.runs import app as runs
from fedunfold.cli.site import app as sites
from fedunfold.cli.theory import theory
from fedunfold.version import VERSION


class Commands(TyperGroup):
    """Leaves Ctrl-C to `main`; typer would exit without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped from None


app = CommandGroup(
    "Learn how much each client should count in each round of federated learning.",
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.example("fedunfold demo")(demo)
app.example("fedunfold learn digits-label-skew --out runs/digits --adjoint exact")(learn)
app.example("fedunfold pretrain settings.toml --out runs/rule")(pretrain)
app.example("fedunfold run digits-label-skew --rule dr:q=1 --absent drop")(run)
app.example("fedunfold compare digits-flaky --methods fedavg,fednova,fedunfold --trials 5")(compare)
app.example("fedunfold report runs/demo")(report)
app.example("fedunfold export runs/digits --to onnx")(export)
app.example("fedunfold predict runs/sites new-patients.csv --out predictions.csv")(predict)
app.add_typer(environments, name="env")
app.add_typer(data, name="data")
app.add_typer(runs, name="runs")
app.add_typer(sites, name="site")
app.example("fedunfold benchmark demo --methods fedavg,fedadam,fedunfold")(benchmark)
app.example("fedunfold reproduce mnist --out runs/mnist --device cuda")(reproduce)
app.example("fedunfold repeat runs/demo")(repeat)
app.example("fedunfold theory runs/demo")(theory)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedunfold {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
