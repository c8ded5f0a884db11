"""Methods by their names in the literature, and parts by short descriptions such as ``prox:mu=0.1``.

A name is [prefix-]base. The base says how clients and server train, the prefix how clients are weighted (any registered
rule), or how updates weighted by size are aggregated (median-, trimmed-, krum-):

| base       | local optimiser | server   |   | prefix    | weights             |
|------------|-----------------|----------|---|-----------|---------------------|
| fedavg     | sgd             | sgd      |   | (none)    | size, N_k/N         |
| fedprox    | prox            | sgd      |   | dr-       | dynamic reweighting |
| fednova    | nova            | sgd      |   | uniform-  | 1/K                 |
| fedavgm    | sgd             | momentum |   | adp-      | FedAdp              |
| fedadam    | sgd             | adam     |   | fa-       | FedFa               |
| fedyogi    | sgd             | yogi     |   | duw-      | learned             |
| fedadagrad | sgd             | adagrad  |   | unbiased- | N_k/N over π_k      |
| fedexp     | sgd             | exp      |   | law-      | FedLAW              |
| fedlws     | sgd             | fedlws   |   |           |                     |
| scaffold   | scaffold        | sgd      |   |           |                     |
| feddyn     | feddyn          | sgd      |   |           |                     |
| fedbn      | sgd             | sgd      |   |           |                     |
| fedper     | sgd             | sgd      |   |           |                     |
| fedbuff    | sgd             | sgd      |   |           |                     |

``scaffold`` and ``feddyn`` weigh alike whoever participates in a round and leave absent clients out (`drop`), as they
were published; with a prefix they have its weights. What they converge to is the optimum of the plain mean of the
clients' losses all the same (`local.scaffold`, `local.feddyn`).

In ``fedbn`` (Li et al. 2021) the normalisation layers stay with the clients, in ``fedper`` (Arivazhagan et al. 2019)
the last layer does (`core.own_layers`); their weights cannot be learned.

In ``fedbuff`` (Nguyen et al. 2022) rounds are asynchronous: the server makes a step whenever a buffer of updates is
full (`core.timetable`), and discounts them by their staleness (`rules.fedbuff`). With a prefix it has its weights:
``uniform-fedbuff`` discounts nothing, and in ``fedunfold-fedbuff`` the pre-trained rule reads the staleness.

``fedadp``, ``fedfa`` and ``fedlaw`` are the usual names of adp-fedavg, fa-fedavg and law-fedavg, and ``feddisco``,
``q-fedavg``, ``afl``, ``fedawa`` and ``online-hypergradient`` those of the rules of these names with fedavg.
``fedunfold`` is the pre-trained rule with the server it is for, and so is every other rule that comes with the package,
by its name such as ``open@1``. ``fedunfold-table`` learns weights for one federation in the way we recommend: nova's
local optimiser, learned weights and step sizes, and a server that remembers absent clients.

A comparison also takes references, which are no federated methods: ``local`` (each client alone), ``pooled`` (all rows
in one place) and ``majority`` (no training at all); `training.references` says how.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fedunfold.core.algorithm import Algorithm, check_algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.own_layers import OwnLayers
from fedunfold.core.parts import AGGREGATORS, LOCAL_OPTIMIZERS, SERVER_OPTIMIZERS
from fedunfold.core.registry import unknown
from fedunfold.local import nova
from fedunfold.rules.learned import LearnedWeights
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.pretrained import pretrained, pretrained_names
from fedunfold.rules.rule import RULES, Weigh, WeightingRule, as_rule
from fedunfold.unfolding import Learning

BASES = {
    "fedavg": ("sgd", "sgd"),
    "fedprox": ("prox", "sgd"),
    "fednova": ("nova", "sgd"),
    "fedavgm": ("sgd", "momentum"),
    "fedadam": ("sgd", "adam"),
    "fedyogi": ("sgd", "yogi"),
    "fedadagrad": ("sgd", "adagrad"),
    "fedexp": ("sgd", "exp"),
    "fedlws": ("sgd", "fedlws"),
    "scaffold": ("scaffold", "sgd"),
    "feddyn": ("feddyn", "sgd"),
    "fedbn": ("sgd", "sgd"),
    "fedper": ("sgd", "sgd"),
    "fedbuff": ("sgd", "sgd"),
}
OWN_LAYERS: dict[str, OwnLayers] = {"fedbn": "normalization", "fedper": "last"}
CONTROLLED = ("scaffold", "feddyn")
"""Bases of which the plain mean of those who participate is a part, so that no other aggregator takes its place."""
ASYNCHRONOUS = "fedbuff"
LEARNED = "duw"
PRETRAINED = "fedunfold"
SHORT_RULES = {"adp": "fedadp", "fa": "fedfa", "law": "fedlaw"}
ROBUST = {"median": "median", "trimmed": "trimmed-mean", "krum": "krum"}
PARSERS = {"local": LOCAL_OPTIMIZERS.parse, "server": SERVER_OPTIMIZERS.parse, "aggregator": AGGREGATORS.parse}
Reference = Literal["local", "pooled", "majority"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
ALIASES = {"fedadp": "adp-fedavg", "fedfa": "fa-fedavg", "fedlaw": "law-fedavg"} | {
    rule: f"{rule}-fedavg" for rule in ("feddisco", "q-fedavg", "afl", "fedawa", "online-hypergradient")
}


@dataclass(frozen=True)
class Method:
    """A named way to train a federation.

    Attributes:
        name: What it is called in tables.
        algorithm: How clients and server train.
        rule: How clients are weighted; without one, weights are learned first.
        learning: How they are learned then.
        reference: What it is, where it is no federated method but a reference in a comparison.

    >>> from fedunfold.rules import uniform
    >>> Method("dropping nova", Algorithm(nova(), absent="drop"), uniform()).algorithm.absent
    'drop'
    """

    name: str
    algorithm: Algorithm
    rule: WeightingRule | None
    learning: Learning = field(default_factory=Learning)
    reference: Reference | None = None

    @property
    def learns(self) -> bool:
        """Whether its weights are learned first."""
        return self.rule is None and self.reference is None

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if self.rule is not None:
            object.__setattr__(self, "rule", as_rule(self.rule))


TABLE = Method(
    "fedunfold-table",
    Algorithm(nova(), absent="remember"),
    None,
    Learning(25, 0.015, outer="balanced", step_sizes="learned", optimizer="adam", decay="none"),
)


def method_names() -> tuple[str, ...]:
    """Every name that `method` knows.

    >>> "duw-fednova" in method_names()
    True
    """
    rules = [name for name in RULES.names() if name not in ("size", ASYNCHRONOUS, *SHORT_RULES.values())]
    prefixes = (*rules, *SHORT_RULES, LEARNED, *ROBUST)
    pairs = ((prefix, base) for prefix in prefixes for base in BASES)
    impossible = (
        {("unbiased", ASYNCHRONOUS)}
        | {(LEARNED, base) for base in (*OWN_LAYERS, ASYNCHRONOUS)}
        | {(kind, base) for kind in ROBUST for base in CONTROLLED}
    )
    combined = (f"{prefix}-{base}" for prefix, base in pairs if (prefix, base) not in impossible)
    learned = (PRETRAINED, *pretrained_names())
    asynchronous = (f"{name}-{ASYNCHRONOUS}" for name in learned)
    return (*BASES, *ALIASES, *combined, *learned, *asynchronous, TABLE.name)


def method(name: str) -> Method:
    """The method of that name, with the literature's default settings.

    >>> method("dr-fednova").algorithm.local.name
    'nova'
    """
    if name == TABLE.name:
        return TABLE
    if name in REFERENCES:
        raise InputError(
            f"'{name}' is no federated method but a reference; name it in a comparison, which simulates it."
        )
    family = name.removesuffix(f"-{ASYNCHRONOUS}")
    if family == PRETRAINED or family in pretrained_names():
        chosen = replace(as_method(pretrained() if family == PRETRAINED else pretrained(family)), name=name)
        return chosen if family == name else asynchronous(chosen)
    if name not in method_names():
        raise InputError(unknown("method", name, method_names(), (*BASES, *ALIASES, PRETRAINED, TABLE.name)))
    prefix, _, base = ALIASES.get(name, name).rpartition("-")
    local, server = BASES[base]
    algorithm = Algorithm(
        LOCAL_OPTIMIZERS.make(local),
        SERVER_OPTIMIZERS.make(server),
        absent="drop" if base in (*CONTROLLED, ASYNCHRONOUS) else "keep",
        aggregator=AGGREGATORS.make(ROBUST.get(prefix, "mean")),
        own_layers=OWN_LAYERS.get(base, "none"),
        schedule="asynchronous" if base == ASYNCHRONOUS else "synchronous",
    )
    if prefix == LEARNED:
        return Method(name, algorithm, None)
    own_rule = "uniform" if base in CONTROLLED else ASYNCHRONOUS if base == ASYNCHRONOUS else "size"
    rule = own_rule if not prefix or prefix in ROBUST else SHORT_RULES.get(prefix, prefix)
    return Method(name, algorithm, RULES.make(rule))


def asynchronous(given: Method) -> Method:
    """The same method in asynchronous rounds, under its own name.

    >>> asynchronous(method("fedprox")).algorithm.schedule
    'asynchronous'
    """
    return replace(given, algorithm=replace(given.algorithm, schedule="asynchronous"))


def changed(
    given: Method,
    *,
    local: str | None = None,
    rule: str | None = None,
    server: str | None = None,
    absent: str | None = None,
    filter: str | None = None,
    aggregator: str | None = None,
) -> Method:
    """The same method with other parts, each described as ``name:key=value,…``; its name then says so.

    Of a reference only local training can be changed, as far as there is any.

    Args:
        given: The method.
        local: Another local optimiser.
        rule: Another weighting rule.
        server: Another server optimiser.
        absent: What becomes of absent clients.
        filter: Which updates are rejected.
        aggregator: Another aggregator.
    """
    if given.reference is not None:
        rule = server = absent = filter = aggregator = None
        local = None if given.reference == "majority" else local
    texts = {"local": local, "server": server, "absent": absent, "filter": filter, "aggregator": aggregator}
    parts: dict[str, Any] = {name: PARSERS.get(name, str)(text) for name, text in texts.items() if text is not None}
    filtered = None if filter is None else f"filter {filter}"
    name = " ".join(part for part in (given.name, local, rule, server, absent, filtered, aggregator) if part)
    algorithm = replace(given.algorithm, **parts)
    return replace(given, name=name, algorithm=algorithm, rule=given.rule if rule is None else RULES.parse(rule))


def learned_method(learned: LearnedWeights, name: str | None = None) -> Method:
    """Learned weights with the algorithm they were learned for."""
    return Method(name or learned.name, learned.algorithm, learned)


def as_method(given: Method | WeightingRule | Weigh | str) -> Method:
    """A method as it is or by its name; learned weights and pre-trained rules with what they were learned for; another
    rule with plain FedAvg."""
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        return method(given)
    if isinstance(given, LearnedWeights):
        return learned_method(given)
    rule = as_rule(given)
    learned_for = rule.algorithm if isinstance(rule, ParametricRule) else None
    return Method(rule.name, learned_for or Algorithm(), rule)


def as_compared(given: Method | WeightingRule | Weigh | str) -> Method:
    """A method as `as_method` has it, or a reference by its name.

    >>> as_compared("local").reference
    'local'
    """
    named = next((name for name in REFERENCES if name == given), None)
    return as_method(given) if named is None else Method(named, Algorithm(), None, reference=named)
