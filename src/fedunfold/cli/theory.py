"""`fedunfold theory`: what the convergence bound says about a run."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedunfold.cli import console
from fedunfold.cli import options as opt
from fedunfold.core.errors import InputError

if TYPE_CHECKING:
    from fedunfold.config import Environment
    from fedunfold.rules.learned import LearnedWeights
    from fedunfold.studies.theory.quantities import Theory


def theory(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    weights: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    env: Annotated[str | None, typer.Option(metavar="ENV")] = None,
    recast: bool = False,
    L: float | None = None,
    sigma: float | None = None,
    G: float | None = None,
    kappa: float | None = None,
    beta: float | None = None,
    gap: float | None = None,
    output: opt.Format = "text",
) -> None:
    """How much a run's learned weights vary, and the convergence bound for them.

    The constants of the assumptions have no defaults: a term or condition that needs one is left out until
    it is given.

    Args:
        run: A folder that `fedunfold learn` or `compare` left behind.
        weights: Which of a comparison's weights, such as duw-fedavg.
        env: The run's environment, where its data have moved.
        recast: Describe unscaled local steps by the weights the theorem is about.
        L: Smoothness of the clients' losses, > 0.
        sigma: Standard deviation of a minibatch gradient.
        G: Root mean square of a minibatch gradient.
        kappa: Dissimilarity κ of the clients.
        beta: Dissimilarity β of the clients, >= 1.
        gap: f(w0) − f_inf: the loss there is to lose.
    """
    from fedunfold.config import environment
    from fedunfold.rules.learned import LearnedWeights
    from fedunfold.studies.theory.analysis import analyse_learned
    from fedunfold.studies.theory.quantities import Constants

    constants = Constants(L=L, sigma=sigma, G=G, kappa=kappa, beta=beta, gap=gap)
    file = _weights_file(run, weights)
    found = environment(_environment_file(run) if env is None else env)
    learned = LearnedWeights.load(file)
    result = analyse_learned(learned, found, constants, recast=recast)
    notes = list(_notes(result, learned, found))
    if output == "json":
        console.print_json(
            {
                "run": str(run),
                "environment": found.name,
                "weights": file.name,
                "keys": learned.client_ids,
                **result.as_json(),
                "notes": notes,
            }
        )
        return
    for table in (
        _variances(result, learned.client_ids),
        _quantities(result),
        _conditions(result),
        _terms(result),
    ):
        console.out.print(table)
    for note in notes:
        console.say(f"note: {note}")


def _weights_file(run: Path, name: str | None) -> Path:
    from fedunfold.core.registry import unknown
    from fedunfold.runs.reader import settings_file
    from fedunfold.runs.schema import MODEL

    settings_file(run)  # refuses what is no run's folder
    files = {file.stem: file for file in sorted(run.glob("*.safetensors")) if file.name != MODEL}
    if not files:
        raise InputError(f"the run in {run} left no learned weights; `fedunfold learn` does.")
    if name is not None:
        stem = name.removesuffix(".safetensors")
        if stem not in files:
            raise InputError(f"{run}: {unknown('weights', stem, files)}")
        return files[stem]
    if len(files) > 1:
        raise InputError(f"{run} holds several weights; choose with --weights one of {', '.join(files)}.")
    return next(iter(files.values()))


def _environment_file(run: Path) -> Path:
    from fedunfold.io.atomic import is_plain_file

    file = run / "environment.toml"
    if not is_plain_file(file):
        raise InputError(f"{run} has no environment.toml (data in memory?); name the environment with --env.")
    return file


def _notes(result: "Theory", learned: "LearnedWeights", env: "Environment") -> Iterable[str]:
    """Where the run is not what the theorem is about, and what was left out."""
    from fedunfold.training.methods import learned_method

    algorithm = learned_method(learned).algorithm
    if result.conditions[-1].holds is False:
        yield (
            f"clients make different numbers of steps and {algorithm.local.name} does not normalise them: "
            "the run goes to another objective than the theorem's; --recast gives the bound for it as it is."
        )
    if unmet := [condition.statement for condition in result.conditions[:-1] if condition.holds is False]:
        yield f"the bound is not established for this run: it is without {', '.join(unmet)}."
    if env.clients_per_round is not None or any(client.participation_probability < 1 for client in env.clients):
        yield "clients may be absent in this environment; the theorem has all of them in every round."
    if sizes := algorithm.step_sizes:
        yield f"the server's steps are scaled by {min(sizes):.3g} to {max(sizes):.3g}; the theorem has 1."
    if algorithm.absent == "remember":
        yield "the server remembers updates of absent clients; the theorem has fresh ones."
    if algorithm.server.name != "sgd":
        yield f"the server is {algorithm.server.name}; the theorem is about plain averaging."
    missing = [name for name, value in vars(result.constants).items() if value is None]
    if missing:
        options = ", ".join(f"--{name}" for name in missing)
        yield f"what is left open (–) needs constants that were not given: {options}."


def _variances(result: "Theory", keys: tuple[str, ...], most: int = 12) -> Table:
    shown = sorted(sorted(range(len(keys)), key=lambda k: -result.variances[k])[:most])
    hidden = len(keys) - len(shown)
    title = "variance of the weights over the rounds" + (f" ({hidden} steadier clients not shown)" if hidden else "")
    rows = (
        *((keys[k], _number(result.objective[k]), _number(result.variances[k])) for k in shown),
        ("mean over clients", "", _number(result.mean_variance)),
        (),
        ("1/√T", "", _number(result.variance_scale)),
    )
    return console.table(title, ("client", "mean weight θ_k", "variance V_k"), rows)


def _quantities(result: "Theory") -> Table:
    low, high = min(result.effective_steps), max(result.effective_steps)
    span = _number(low) if low == high else f"{_number(low)} … {_number(high)}"
    rows = (
        ("T, K", "rounds, clients", f"{result.rounds}, {result.clients}", ""),
        ("η", "local learning rate", _number(result.lr), ""),
        ("√(K/(τ̃T))", "learning rate of the stated rate", _number(result.rate_lr), ""),
        ("τ̃", "mean local steps", _number(result.mean_steps), ""),
        ("τ_eff", "effective steps", span, ""),
        ("Ã", "noise", _number(result.a_tilde), _number(result.a_tilde_published)),
        ("B̃", "local noise", _number(result.b_tilde), f"<= {_number(max(result.b_tilde_published))}"),
        ("C̃", "drift", _number(result.c_tilde), ""),
        ("D/L²", "largest drift", _number(result.d_per_l2), ""),
        ("D", "", _number(result.d), ""),
    )
    return console.table(
        "quantities of the theorem", ("symbol", "what it is", "value", "as published"), rows, words=(0, 1)
    )


def _conditions(result: "Theory") -> Table:
    words = {True: "yes", False: "no", None: "–"}
    rows = (
        (found.statement, _number(found.left), _number(found.right), words[found.holds]) for found in result.conditions
    )
    return console.table("conditions of the derivation", ("condition", "left", "right", "holds"), rows)


def _terms(result: "Theory") -> Table:
    formulas = {
        "start": "4 (f(w0) − f_inf)/(T τ_eff η)",
        "noise": "4 η L σ² Ã/K",
        "local_noise": "10 η² L² σ² B̃",
        "dissimilarity": "20 η² L² κ² C̃",
        "varying_weights": "4 · 2^K (σ² + G²) Σ V_k",
    }
    bounds = result.bound, result.published_bound
    rows = (
        *(
            (name.replace("_", " "), formula, *(_number(getattr(bound, name)) for bound in bounds))
            for name, formula in formulas.items()
        ),
        (),
        ("sum", "", *(_number(bound.total) for bound in bounds)),
    )
    title = "bound on the mean of ‖∇f‖² over the rounds"
    return console.table(title, ("term", "formula", "value", "as published"), rows, words=(0, 1))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
