"""The methods of a benchmark, with the settings that each one's are chosen among.

Settings are written as parts of a method, ``part=name:key=value``, separated by blanks:
``local=prox:mu=0.1 server=sgd:lr=2``. Parts are those of `changed`, and ``outer_lr`` for methods that learn weights.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from typing import Annotated, Any

from pydantic import Field

from fedunfold.core.errors import InputError
from fedunfold.core.registry import unknown
from fedunfold.core.settings import Count, Natural, Settings
from fedunfold.rules.pretrained import pretrained_names
from fedunfold.rules.rule import describe_rule
from fedunfold.training.methods import Method, changed, method, method_names

GRID_SIZE = 5
PARTS = ("local", "rule", "server", "absent", "filter", "aggregator")
OUTER_LR = "outer_lr"
FILES = ("contenders", "defaults")
LEARNED = "weights learned for the federation"


class Contender(Settings):
    """A method with a grid.

    Attributes:
        base: The method's name.
        parts: What is changed whatever the settings are.
        grid: Settings to choose among, as many for all methods at most.
        default: The settings without a choice; the literature's where it is empty.
        gain: By how many points these are better than FedAvg where they were chosen.
        tuned_on: On how many drawn federations they were chosen, once for all; 0 for none.
        given: What it is given beside what every method has, where its rule does not say so itself.
        environment: Fields of the environment that are other for it, such as rows that the server gets of the clients'.
        vectors: Vectors of the model's size that a participating client receives and sends in a round.
    """

    base: str = ""
    parts: str = "absent=drop"
    grid: Annotated[tuple[str, ...], Field(max_length=GRID_SIZE)] = ()
    default: str = ""
    gain: float = 0.0
    tuned_on: Natural = 0
    given: tuple[str, ...] = ()
    environment: Mapping[str, Any] = Field(default_factory=dict)
    vectors: Count = 2

    def __hash__(self) -> int:
        return hash((self.base, self.parts, self.grid, self.default))

    def method(self, settings: str = "") -> Method:
        """It with these settings, ready to run or, without a rule, to learn weights.

        Raises:
            InputError: Something in it is unknown.

        >>> Contender(base="fedprox").method("local=prox:mu=0.1").algorithm.local
        Prox(mu=0.1)
        """
        return _method(self, settings)

    def described(self, settings: str) -> str:
        """What a run with these settings is: a record with another text is of another method.

        >>> Contender(base="fedavg").described("server=sgd:lr=2")
        'fedavg absent=drop server=sgd:lr=2'
        """
        rule = self.method(settings).rule
        learned = "" if rule is None else str(describe_rule(rule)["parameters"] or "")[:16]
        changes = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return " ".join(f"{self.base} {self.parts} {settings} {changes} {learned}".split())

    def about(self) -> dict[str, Any]:
        """It in plain values, for a page that is made from records alone."""
        described = {settings: self.described(settings) for settings in dict.fromkeys((self.default, *self.grid))}
        return {**self.model_dump(mode="json"), "uses": sorted(self.uses), "described": described}

    @property
    def uses(self) -> frozenset[str]:
        """What it is given beside what every method has: what the entry and its rule say, and weights of its own."""
        rule = self.method().rule
        return frozenset(self.given) | ({LEARNED} if rule is None else frozenset(getattr(rule, "uses", ())))


@lru_cache(maxsize=256)
def _method(contender: Contender, settings: str) -> Method:
    parts = dict(_part(text) for text in f"{contender.parts} {settings}".split())
    lr = parts.pop(OUTER_LR, None)
    made = changed(method(contender.base), **parts)
    if lr is None:
        return made
    try:
        return replace(made, learning=replace(made.learning, lr=float(lr)))
    except ValueError as error:
        raise InputError(f"'{lr}' in '{settings}' is not a number.") from error


def _part(text: str) -> tuple[str, str]:
    part, equals, value = text.partition("=")
    if not equals or part not in (*PARTS, OUTER_LR):
        known = ", ".join((*PARTS, OUTER_LR))
        raise InputError(f"cannot read the setting '{text}'; write part=name:key=value with a part of {known}.")
    return part, value


def contenders(
    names: Iterable[str] = (), own: Mapping[str, Contender] | None = None, without: Iterable[str] = ()
) -> dict[str, Contender]:
    """The methods of that name in the order of the table; without names all there are.

    Args:
        names: A method that is not in the table is one without a grid.
        own: Contenders beside those of the table, or in the place of some.
        without: Those left out where no names are given.

    Raises:
        InputError: There is no such method, or settings of it are wrong.

    >>> list(contenders(["fedexp", "fedavg"]))
    ['fedavg', 'fedexp']
    """
    known = {**_table(), **{name: _based(name, found) for name, found in (own or {}).items()}}
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known and name not in method_names():
            raise InputError(unknown("method", name, dict.fromkeys((*known, *method_names())), known))
    chosen = {name: found for name, found in known.items() if (name in wanted if wanted else name not in set(without))}
    brought = pretrained_names()  # with the treatment of absent clients that they are for
    for name in wanted:
        if name not in known:
            chosen[name] = Contender(base=name, parts="") if name in brought else Contender(base=name)
    for name, contender in chosen.items():
        for settings in (contender.default, *contender.grid):
            try:
                contender.method(settings)
            except InputError as error:
                raise InputError(f"method {name}: {error}") from error
    return chosen


def table_order(name: str) -> tuple[int, str]:
    """A key that sorts methods as the table has them, others after these by name."""
    order = list(_table())
    return (order.index(name) if name in order else len(order)), name


@cache
def _table() -> dict[str, Contender]:
    """Those of the package's own table that this version knows."""
    folder = resources.files("fedunfold.studies.benchmark")
    entries, defaults = (tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8")) for name in FILES)
    found = {name: _based(name, Contender(**entry, **defaults.get(name, {}))) for name, entry in entries.items()}
    known = set(method_names())
    return {name: contender for name, contender in found.items() if contender.base in known}


def _based(name: str, contender: Contender) -> Contender:
    return contender if contender.base else contender.model_copy(update={"base": name})
