"""Methods by their names in the literature, and parts by short descriptions such as ``prox:mu=0.1``.

A name is [prefix-]base. The base says how clients and server update, the prefix how clients are weighted, or how
updates weighted by size are put together (`robust`: median-, trimmed-, krum-):

| base      | local update | server  |   | prefix   | weights            |
|-----------|--------------|---------|---|----------|--------------------|
| fedavg    | sgd          | plain   |   | (none)   | size, N_k/N        |
| fedprox   | prox         | plain   |   | dr-      | dynamic reweighting |
| fednova   | nova         | plain   |   | uniform- | 1/K                |
| fedavgm   | sgd          | momentum|   | adp-     | FedAdp             |
| fedadam   | sgd          | adam    |   | fa-      | FedFa              |
| fedyogi   | sgd          | yogi    |   | duw-     | learned            |
| fedadagrad| sgd          | adagrad |   |          |                    |

``fedadp`` and ``fedfa`` are the usual names of adp-fedavg and fa-fedavg. ``fedunfold`` is the setting we
recommend: nova's local update, learned weights and step sizes, and a server that remembers absent clients.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fedunfold import rules
from fedunfold.aggregation import robust
from fedunfold.aggregation.absent import check_absent
from fedunfold.aggregation.screening import check_update_filter
from fedunfold.core.errors import InputError
from fedunfold.local import optimizers as local
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.rule import WeightingRule, as_rule
from fedunfold.server import optimizers as server
from fedunfold.training.loop import Algorithm, check_algorithm
from fedunfold.unfolding import Learning

Part = TypeVar("Part")

UPDATES: Mapping[str, Callable[..., local.LocalOptimizer]] = {
    "sgd": local.sgd,
    "prox": local.prox,
    "nova": local.nova,
    "momentum": local.momentum,
    "accumulated-sgd": lambda: local.accumulated(local.sgd()),
    "accumulated-prox": lambda mu=0.01: local.accumulated(local.prox(mu)),
    "accumulated-momentum": lambda rho=0.9: local.accumulated(local.momentum(rho)),
}
SERVERS: Mapping[str, Callable[..., server.ServerOptimizer]] = {
    "plain": server.plain,
    "momentum": server.momentum,
    "adam": server.adam,
    "yogi": server.yogi,
    "adagrad": server.adagrad,
}
AGGREGATORS: Mapping[str, Callable[..., robust.Aggregator]] = {
    "mean": robust.mean,
    "median": robust.median,
    "trimmed": robust.trimmed,
    "krum": robust.krum,
}
RULES: Mapping[str, Callable[..., WeightingRule]] = {
    "size": rules.size,
    "uniform": rules.uniform,
    "dr": rules.dr,
    "fedadp": rules.fedadp,
    "fedfa": rules.fedfa,
}
BASES = {
    "fedavg": ("sgd", "plain"),
    "fedprox": ("prox", "plain"),
    "fednova": ("nova", "plain"),
    "fedavgm": ("sgd", "momentum"),
    "fedadam": ("sgd", "adam"),
    "fedyogi": ("sgd", "yogi"),
    "fedadagrad": ("sgd", "adagrad"),
}
PREFIXES = {"dr": "dr", "uniform": "uniform", "adp": "fedadp", "fa": "fedfa", "duw": "learned"}
ROBUST = tuple(name for name in AGGREGATORS if name != "mean")
ALIASES = {"fedadp": "adp-fedavg", "fedfa": "fa-fedavg"}


@dataclass(frozen=True)
class Method:
    """A named way to train a federation. Without a rule, weights are learned for it first, by `learning`.

    >>> Method("dropping nova", Algorithm(local.nova(), absent="drop"), rules.uniform()).algorithm.absent
    'drop'
    """

    name: str
    algorithm: Algorithm
    rule: WeightingRule | None
    learning: Learning = field(default_factory=Learning)

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if self.rule is not None:
            object.__setattr__(self, "rule", as_rule(self.rule))


RECOMMENDED = Method(
    "fedunfold",
    Algorithm(local.nova(), absent="remember"),
    None,
    Learning(25, 0.015, outer="balanced", step_sizes="learned", optimizer="adam", decay="none"),
)


def method_names() -> tuple[str, ...]:
    """Every name that `method` knows.

    >>> "duw-fednova" in method_names()
    True
    """
    prefixed = [f"{prefix}-{base}" for prefix in (*PREFIXES, *ROBUST) for base in BASES]
    return (*BASES, *ALIASES, *prefixed, RECOMMENDED.name)


def method(name: str) -> Method:
    """The method of that name, with the literature's default settings.

    >>> method("dr-fednova").algorithm.update.name
    'nova'
    """
    if name == RECOMMENDED.name:
        return RECOMMENDED
    canonical = ALIASES.get(name, name)
    prefix, _, base = canonical.rpartition("-")
    if base not in BASES or (prefix and prefix not in PREFIXES and prefix not in ROBUST):
        raise InputError(unknown("method", name, method_names()))
    update, optimizer = BASES[base]
    rule = PREFIXES.get(prefix, "size")
    aggregate = AGGREGATORS[prefix if prefix in ROBUST else "mean"]()
    return Method(
        name,
        Algorithm(UPDATES[update](), SERVERS[optimizer](), aggregate=aggregate),
        None if rule == "learned" else RULES[rule](),
    )


def changed(
    given: Method,
    *,
    update: str | None = None,
    rule: str | None = None,
    server: str | None = None,
    absent: str | None = None,
    screen: str | None = None,
    aggregate: str | None = None,
) -> Method:
    """The same method with other parts, each described as ``name:key=value,…``; its name then says so."""
    algorithm, weigh = given.algorithm, given.rule
    if update is not None:
        algorithm = replace(algorithm, update=part("update", update, UPDATES))
    if server is not None:
        algorithm = replace(algorithm, server=part("server", server, SERVERS))
    if absent is not None:
        algorithm = replace(algorithm, absent=check_absent(absent))
    if screen is not None:
        algorithm = replace(algorithm, screen=check_update_filter(screen))
    if aggregate is not None:
        algorithm = replace(algorithm, aggregate=part("aggregation", aggregate, AGGREGATORS))
    if rule is not None:
        weigh = part("rule", rule, RULES)
    screened = None if screen is None else f"screen {screen}"
    name = " ".join(filter(None, [given.name, update, rule, server, absent, screened, aggregate]))
    return Method(name, algorithm, weigh, given.learning)


def learned_method(learned: LearnedWeights, name: str | None = None) -> Method:
    """Learned weights with the update, server and absence they were learned for."""
    try:
        recorded = dict(learned.settings["algorithm"])
        algorithm = Algorithm(
            local.LocalOptimizer(**recorded.pop("update")),
            server.ServerOptimizer(**recorded.pop("server")),
            aggregate=robust.Aggregator(**recorded.pop("aggregate", {})),
            **recorded,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the learned weights do not say what they were learned for ({error}).") from error
    return Method(name or learned.name, algorithm, learned)


def part(kind: str, description: str, known: Mapping[str, Callable[..., Part]]) -> Part:
    """Build ``name`` or ``name:key=value,key=value`` from the constructors known."""
    name, _, arguments = description.partition(":")
    if name not in known:
        raise InputError(unknown(kind, name, known))
    accepted = inspect.signature(known[name]).parameters
    settings: dict[str, float | str] = {}
    for argument in filter(None, arguments.split(",")):
        key, equals, value = argument.partition("=")
        if not equals or key not in accepted:
            takes = f"takes {', '.join(accepted)}" if accepted else "takes no settings"
            raise InputError(f"{kind} '{name}': cannot read '{argument}'; it {takes}, as {name}:key=value.")
        settings[key] = value if isinstance(accepted[key].default, str) else _number(value, description)
    return known[name](**settings)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name nobody has, with the nearest one that exists."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(known)}."
    return f"unknown {kind} '{name}'; {hint}"


def _number(text: str, description: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"'{text}' in '{description}' is not a number.") from error
