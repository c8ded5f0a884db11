"""`python -m benchmarks COMMAND`, one of those below: measure, show, write a page."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from fedunfold.cli import options as opt
from fedunfold.core.errors import FedunfoldError, InputError
from fedunfold.io.atomic import read_json

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.figure import Figure

DIGITS = ["digits-label-skew"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure fedunfold on this machine; each takes minutes.",
)

Repeats = Annotated[int, typer.Option("--repeats", min=1, help="How often each thing is measured.")]
Page = Annotated[
    Path | None, typer.Option("--page", metavar="FILE", help="Also write what was measured as a Markdown page.")
]
Environments = Annotated[
    list[str] | None, typer.Option("--env", metavar="ENV", help="By default digits-label-skew; may be given twice.")
]
Rules = Annotated[
    list[str] | None, typer.Option("--rule", metavar="KIND", help="By default every kind; may be given twice.")
]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="Make the page from what was measured before, which lies beside it."),
]
Others = Annotated[
    list[str] | None,
    typer.Option("--other", metavar="NAME=COMMAND", help="Another simulator to measure; see benchmarks/README.md."),
]


class Measured(Protocol):
    """What came out of a benchmark."""

    def as_json(self) -> "dict[str, Any]": ...


@app.command(epilog="Example: python -m benchmarks engine --repeats 5 --page docs/benchmarks.md")
def engine(repeats: Repeats = 5, page: Page = None, other: Others = None, output: opt.Format = "text") -> None:
    """The engine beside a plain loop, autograd through all rounds and Flower's simulation."""
    from benchmarks.markdown import growth_figure, page_of
    from benchmarks.timing import measure

    commands = _commands(other or ())
    with _progress() as log:
        found = measure(repeats, commands, log)
    figure = _figure_name(page, "benchmarks")
    _present(found, page_of(found, figure), page, output, growth_figure(found.scaling))


@app.command(epilog="Example: python -m benchmarks schedules --env mnist-2 --device cuda --page docs/schedules.md")
def schedules(
    env: Environments = None, device: opt.Device = "cpu", page: Page = None, output: opt.Format = "text"
) -> None:
    """Outer loss and accuracy against the time of learning, by the fast schedule and by the paper's."""
    from benchmarks.schedule_study import measure_schedules, schedules_figure, schedules_page

    with _progress() as log:
        found = measure_schedules(env or DIGITS, device, log)
    _present(found, schedules_page(found, _figure_name(page, "schedules")), page, output, schedules_figure(found))


@app.command(epilog="Example: python -m benchmarks device --device cuda --page docs/gpu-times.md")
def device(
    env: Environments = None,
    repeats: Repeats = 5,
    device: opt.Device = "cpu",
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """Local steps, weight-learning runs and runs on the CPU or a GPU."""
    from benchmarks.device import device_page, measure_device

    with _progress() as log:
        found = measure_device(env or DIGITS, device, repeats, log)
    _present(found, device_page(found), page, output)


@app.command(
    "rule", epilog="Example: python -m benchmarks rule --rule rule.safetensors --out docs/results/rule --processes 16"
)
def evaluate_rule(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The page's folder; records are in it.")],
    rule: Annotated[str | None, typer.Option("--rule", metavar="FILE|NAME", help="The pre-trained rule.")] = None,
    only: Annotated[str, typer.Option("--only", metavar="SECTION,…", help="By default all sections.")] = "",
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many runs are made at a time.")] = 1,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Trials of every federation.")] = None,
    federations: Annotated[
        int | None, typer.Option("--federations", min=1, help="How many are drawn, where they are drawn by number.")
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option("--merge", metavar="DIR", help="Take in records of another folder first.")
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Only write the page of the records there are.")] = False,
) -> None:
    """A pre-trained rule beside rivals with tuned server steps; a later call makes the runs that are missing."""
    from benchmarks.rule.evaluate import Amounts, evaluate
    from benchmarks.rule.page import write_page
    from benchmarks.rule.records import Records
    from fedunfold.cli import console
    from fedunfold.io.atomic import FolderLock

    if rule is None and not page:
        raise InputError("--rule is missing; give the rule's file or name, or --page for the page alone.")
    (out / "records").mkdir(parents=True, exist_ok=True)
    with FolderLock(out / "records"):
        Records(out / "records").merge(merge or ())
        if rule is None or page:
            write_page(out)
        else:
            named = [name for name in only.split(",") if name]
            evaluate(rule, out, named, processes, Amounts(trials, federations), console.err.print)
    console.say(f"{out / 'README.md'}")


@app.command(name="rule-overhead", epilog="Example: python -m benchmarks rule-overhead --rule formula --repeats 5")
def rule_overhead(rule: Rules = None, repeats: Repeats = 3, page: Page = None, output: opt.Format = "text") -> None:
    """What a rule with parameters adds to a round."""
    from benchmarks.rule_overhead import measure_overhead, overhead_page
    from fedunfold.rules.families import FAMILIES

    if unknown := set(rule or ()) - set(FAMILIES):
        raise InputError(f"--rule {min(unknown)}: choose among {', '.join(FAMILIES)}.")
    chosen = [family for family in FAMILIES if not rule or family in rule]
    with _progress() as log:
        found = measure_overhead(chosen, repeats, log)
    _present(found, overhead_page(found), page, output)


@app.command(epilog="Example: python -m benchmarks strategy --clients 20")
def strategy(
    clients: Annotated[int, typer.Option("--clients", min=2, help="How many replies a round has.")] = 10,
    parameters: Annotated[int, typer.Option("--parameters", min=1000, help="Of the model.")] = 11_000_000,
    repeats: Repeats = 1,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """Time and memory of a Flower server's aggregation, beside FedAvg's."""
    from benchmarks.strategy_cost import measure_strategies, strategies_page

    with _progress() as log:
        found = measure_strategies(clients, parameters, repeats, log)
    _present(found, strategies_page(found), page, output)


@app.command(name="learning-traffic", epilog="Example: python -m benchmarks learning-traffic --rounds 20")
def learning_traffic(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many an outer step unrolls.")] = 10,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """Messages and bytes by which weights are learned over Flower."""
    from benchmarks.learning_traffic import measure_traffic, traffic_page

    with _progress() as log:
        found = measure_traffic(rounds, log)
    _present(found, traffic_page(found), page, output)


@app.command(epilog="Example: python -m benchmarks secure --clients 50 --page docs/results/secure/README.md")
def secure(
    clients: Annotated[int, typer.Option("--clients", min=3, help="How many there are.")] = 50,
    lost: Annotated[int, typer.Option("--lost", min=0, help="How many drop out in every round.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Of each run.")] = 2,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """Messages, bytes and time of secure sums, beside an open run."""
    from benchmarks.secure_cost import measure_sums, sums_page

    with _progress() as log:
        found = measure_sums(clients, lost, rounds, log)
    _present(found, sums_page(found), page, output)


@app.command(name="feature-gradient", epilog="Example: python -m benchmarks feature-gradient --federations 12")
def feature_gradient(
    rule: Annotated[str, typer.Option("--rule", metavar="FILE|NAME", help="The pre-trained rule.")] = "open",
    federations: Annotated[int, typer.Option("--federations", min=1, help="How many are drawn.")] = 12,
    directions: Annotated[int, typer.Option("--directions", min=2, help="Along how many directions.")] = 16,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """How far the gradient a rule is learned by is from that through its features."""
    from benchmarks.feature_gradient import feature_gradient_page, measure_feature_gradients

    with _progress() as log:
        found = measure_feature_gradients(rule, federations, directions, log)
    _present(found, feature_gradient_page(found), page, output)


@app.command(epilog="Example: python -m benchmarks losses --page docs/results/rule/losses.md")
def losses(
    federations: Annotated[int, typer.Option("--federations", min=1, help="How many are drawn.")] = 96,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """Which loss agrees with the accuracy on which of two models is better."""
    from benchmarks.loss_agreement import loss_agreement_page, measure_loss_agreement

    with _progress() as log:
        found = measure_loss_agreement(federations, log)
    _present(found, loss_agreement_page(found), page, output)


@app.command(epilog="Example: python -m benchmarks pretraining --page docs/results/rule/pretraining.md")
def pretraining(
    variant: Annotated[
        list[str] | None, typer.Option("--variant", metavar="NAME", help="By default all; may be given several times.")
    ] = None,
    page: Page = None,
    output: opt.Format = "text",
) -> None:
    """What helps in learning a rule: short pre-trainings that differ in one thing each."""
    from benchmarks.pretraining_study import VARIANTS, measure_pretraining, pretraining_page

    if unknown := set(variant or ()) - set(VARIANTS):
        raise InputError(f"--variant {min(unknown)}: choose among {', '.join(VARIANTS)}.")
    with _progress() as log:
        found = measure_pretraining(variant or list(VARIANTS), log)
    _present(found, pretraining_page(found), page, output)


@app.command(
    name="many-clients", epilog="Example: python -m benchmarks many-clients --page docs/results/many-clients.md"
)
def many_clients(
    clients: Annotated[
        list[int] | None, typer.Option("--clients", min=2, help="By default 1,000 and 10,000; may be given twice.")
    ] = None,
    page: Page = None,
    record: Record = None,
    output: opt.Format = "text",
) -> None:
    """Seconds, memory and records of runs with thousands of clients."""
    from benchmarks.many_clients import CLIENTS, ManyClients, many_clients_page, measure_many_clients

    with _progress() as log:
        if record is None:
            found = measure_many_clients(log, clients or CLIENTS)
        else:
            found = ManyClients.from_json(read_json(record))
    _present(found, many_clients_page(found), page, output, recorded=True)


@app.command(epilog="Example: python -m benchmarks asynchronous --page docs/results/asynchronous.md")
def asynchronous(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Of synchronous runs.")] = 50,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of the server in asynchronous runs.")] = 300,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many are shown.")] = 3,
    page: Page = None,
    record: Record = None,
    output: opt.Format = "text",
) -> None:
    """Simulated time to the accuracy of a synchronous run, by FedBuff with several discounts of stale updates."""
    from benchmarks.asynchronous import Asynchronous, asynchronous_page, measure_asynchronous

    with _progress() as log:
        if record is None:
            found = measure_asynchronous(rounds, steps, trials, log)
        else:
            found = Asynchronous.from_json(read_json(record))
    _present(found, asynchronous_page(found), page, output, recorded=True)


@app.command(epilog="Example: python -m benchmarks defaults --out runs/defaults --processes 8")
def defaults(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records, from which it resumes.")],
    federations: Annotated[int, typer.Option(min=1, help="How many are drawn.")] = 96,
    processes: Annotated[int, typer.Option(min=1, help="Runs made at a time.")] = 1,
) -> None:
    """What methods of `fedunfold benchmark` are run with where nothing is chosen for the federation itself."""
    from benchmarks.defaults import choose_defaults

    choose_defaults(out, federations, processes, typer.echo)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal that shows what is being measured."""
    from fedunfold.cli import console

    with console.progress() as bars:
        bar = bars.add_task("measuring", total=None, note="")
        yield lambda now: bars.update(bar, note=now)


def _figure_name(page: Path | None, name: str) -> str:
    """A page's figure lies beside it."""
    return (page or Path(name)).with_suffix(".png").name


def _present(
    found: Measured,
    text: str,
    page: Path | None,
    output: opt.Format,
    figure: "Figure | None" = None,
    *,
    recorded: bool = False,
) -> None:
    """Show what was measured; write the page, its figure and, where it is made of one, its record beside it."""
    from fedunfold.cli import console
    from fedunfold.plotting import save
    from fedunfold.runs.artifacts import text_writer

    if page is not None:
        if figure is not None:
            save(figure, page.with_suffix(".png"))
        files = {page: text}
        if recorded:
            files[page.with_suffix(".json")] = json.dumps(found.as_json(), indent=1) + "\n"
        for file, content in files.items():
            text_writer(content)(file)
    if output == "json":
        console.print_json(found.as_json())
    else:
        console.say(text)


def _commands(others: Sequence[str]) -> dict[str, str]:
    """The other simulators' commands by name."""
    split = [other.partition("=") for other in others]
    for name, _, command in split:
        if not name or not command:
            raise InputError(f"--other {name}: give it as NAME=COMMAND.")
    return {name: command for name, _, command in split}


def main() -> None:
    """Run a benchmark; an error is one line."""
    try:
        app(prog_name="python -m benchmarks")
    except FedunfoldError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
