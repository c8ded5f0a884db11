"""Named parts: this package's, other packages', and what is said about names and settings that do not fit."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import numpy as np
import pytest

from fedunfold.core import registry
from fedunfold.core.errors import InputError
from fedunfold.core.parts import (
    AGGREGATORS,
    CLIENT_SAMPLERS,
    LOCAL_OPTIMIZERS,
    OUTER_LOSSES,
    SERVER_OPTIMIZERS,
    ClientSampler,
    KnownClients,
    Part,
)
from fedunfold.core.registry import Registry
from fedunfold.local import prox
from fedunfold.rules import RULES, dr
from fedunfold.training.methods import changed, method, method_names
from tests.support.federations import participation, tiny

GROUPS: dict[str, Registry[Any]] = {
    "fedunfold.rules": RULES,
    "fedunfold.server_optimizers": SERVER_OPTIMIZERS,
    "fedunfold.local_optimizers": LOCAL_OPTIMIZERS,
    "fedunfold.aggregators": AGGREGATORS,
    "fedunfold.outer_losses": OUTER_LOSSES,
    "fedunfold.client_samplers": CLIENT_SAMPLERS,
}


def spoon(length: float = 2.0, material: str = "wood") -> tuple[float, str]:
    return length, material


def fork() -> str:
    return "fork"


@pytest.fixture
def cutlery() -> Registry[Any]:
    found: Registry[Any] = Registry("piece", "fedunfold.cutlery", "fedunfold.core.errors")
    found.register("spoon")(spoon)
    found.register("fork")(fork)
    return found


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretend that other packages have these entry points: (group, name, what loading gives or raises)."""
    registry._entry_points.cache_clear()

    def pretend(*points: tuple[str, str, Any]) -> None:
        class Pretended(EntryPoint):
            def load(self) -> Any:
                (found,) = (thing for group, name, thing in points if (group, name) == (self.group, self.name))
                if isinstance(found, Exception):
                    raise found
                return found

        listed = EntryPoints(Pretended(name, "elsewhere:thing", group) for group, name, _ in points)
        monkeypatch.setattr(registry, "entry_points", lambda group: listed.select(group=group))

    yield pretend
    registry._entry_points.cache_clear()


# --- names and settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("fedunfold.rules", {"size", "uniform", "dr", "fedadp", "fedfa", "unbiased"}),
        ("fedunfold.server_optimizers", {"sgd", "momentum", "adam", "yogi", "adagrad", "exp"}),
        ("fedunfold.local_optimizers", {"sgd", "prox", "nova", "momentum", "scaffold", "feddyn", "accumulated-prox"}),
        ("fedunfold.aggregators", {"mean", "median", "trimmed-mean", "krum"}),
        ("fedunfold.outer_losses", {"path", "sample", "balanced", "final", "final-balanced", "mse"}),
        ("fedunfold.client_samplers", {"uniform", "by-size", "importance", "power-of-choice", "round-robin"}),
    ],
)
def test_what_this_package_has(group: str, names: set[str]) -> None:
    found = GROUPS[group]
    assert found.group == group
    assert set(found.names()) >= names
    for name in names:
        assert found.make(name).name == name


@pytest.mark.parametrize("found", [LOCAL_OPTIMIZERS, SERVER_OPTIMIZERS, AGGREGATORS, OUTER_LOSSES, CLIENT_SAMPLERS])
def test_every_part_is_made_again_from_its_description(found: Registry[Part]) -> None:
    for name in found.names():
        part = found.make(name)
        assert found.make(**part.describe()) == part


def test_settings(cutlery: Registry[Any]) -> None:
    assert cutlery.names() == ("spoon", "fork")
    assert cutlery.make("spoon") == (2.0, "wood")
    assert cutlery.make("spoon", length=3.0, material="steel") == (3.0, "steel")
    assert cutlery.factory("fork") is fork


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("spoon", (2.0, "wood")),
        ("spoon:", (2.0, "wood")),
        ("spoon:length=1.5", (1.5, "wood")),
        ("spoon:material=steel,length=1e-1", (0.1, "steel")),
        ("fork", "fork"),
    ],
)
def test_descriptions(cutlery: Registry[Any], text: str, made: Any) -> None:
    assert cutlery.parse(text) == made


def test_descriptions_of_parts() -> None:
    assert LOCAL_OPTIMIZERS.parse("prox:mu=0.3") == prox(0.3)
    assert RULES.parse("dr:q=2,loss=start").name == dr(2, loss="start").name
    assert SERVER_OPTIMIZERS.parse("adam:lr=0.05,beta2=0.9").describe()["beta2"] == 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spon", "unknown piece 'spon'; did you mean 'spoon'?"),
        ("knife", "unknown piece 'knife'; choose one of spoon, fork."),
        ("spoon:width=3", r"piece 'spoon': cannot read 'width=3'; it takes length, material, as spoon:key=value."),
        ("spoon:3", r"piece 'spoon': cannot read '3'; it takes length, material"),
        ("fork:length=3", r"piece 'fork': cannot read 'length=3'; it takes no settings"),
        ("spoon:length=long", r"'long' in 'spoon:length=long' is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused(cutlery: Registry[Any], text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cutlery.parse(text)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nova", "did you mean 'fednova'?"),
        ("fedavgg", "did you mean 'fedavg'?"),
        ("lookahead", "choose one of fedavg, fedprox"),
    ],
)
def test_only_a_near_name_is_suggested(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=re.escape(hint)) as raised:
        method(name)
    assert "dr-fedavg" not in str(raised.value), "there are too many combinations to be listed"


def test_what_cannot_be_made_is_refused(cutlery: Registry[Any]) -> None:
    with pytest.raises(InputError, match="unknown piece 'spon'; did you mean 'spoon'"):
        cutlery.make("spon")
    with pytest.raises(InputError, match="piece 'spoon' has no setting 'width'; it takes length, material"):
        cutlery.make("spoon", width=3.0)
    with pytest.raises(InputError, match="piece 'fork' has no setting 'length'; it takes no settings"):
        cutlery.make("fork", length=3.0)


def test_a_name_can_be_registered_once(cutlery: Registry[Any]) -> None:
    with pytest.raises(InputError, match="there are two pieces named 'fork'; give one of them another name"):
        cutlery.register("fork")(spoon)
    assert cutlery.make("fork") == "fork"


def test_what_is_registered_stays_what_it_was(cutlery: Registry[Any]) -> None:
    assert cutlery.register("ladle")(spoon) is spoon


# --- other packages' ---------------------------------------------------------------------------------------


def test_another_package_adds_a_part(cutlery: Registry[Any], install: Install) -> None:
    install(("fedunfold.cutlery", "ladle", spoon), ("fedunfold.rules", "elsewhere", fork))
    assert cutlery.names() == ("spoon", "fork", "ladle")
    assert cutlery.parse("ladle:length=7") == (7.0, "wood")
    assert cutlery.make("ladle", material="tin") == (2.0, "tin")
    with pytest.raises(InputError, match="did you mean 'ladle'"):
        cutlery.make("ladl")


def test_ours_wins_over_another_packages_of_the_same_name(cutlery: Registry[Any], install: Install) -> None:
    install(("fedunfold.cutlery", "fork", spoon))
    assert cutlery.names() == ("spoon", "fork")
    assert cutlery.make("fork") == "fork"


def test_a_package_that_cannot_be_loaded_is_named(cutlery: Registry[Any], install: Install) -> None:
    install(("fedunfold.cutlery", "ladle", ModuleNotFoundError("No module named 'tin'")))
    assert "ladle" in cutlery.names(), "it is loaded only when it is needed"
    with pytest.raises(
        InputError,
        match=r"piece 'ladle' of the entry point elsewhere:thing cannot be loaded: ModuleNotFoundError: No module "
        r"named 'tin'; fix or uninstall that package\.",
    ):
        cutlery.make("ladle")


def broken(length: float = 1.0) -> None:
    raise InputError(f"a ladle needs length > 2, not {length}.")


def test_what_a_factory_raises_is_not_hidden(cutlery: Registry[Any], install: Install) -> None:
    install(("fedunfold.cutlery", "ladle", broken))
    with pytest.raises(InputError, match="a ladle needs length > 2, not 1"):
        cutlery.parse("ladle:length=1")
    install(("fedunfold.cutlery", "ladle", lambda: 1 / 0))
    registry._entry_points.cache_clear()
    with pytest.raises(ZeroDivisionError):
        cutlery.make("ladle")


@pytest.mark.parametrize(
    ("name", "rule", "local", "server"),
    [
        ("q-fedavg", "q-fedavg", "sgd", "sgd"),
        ("q-fedavg-fedavg", "q-fedavg", "sgd", "sgd"),
        ("q-fedavg-fednova", "q-fedavg", "nova", "sgd"),
        ("online-hypergradient", "online-hypergradient", "sgd", "sgd"),
        ("online-hypergradient-fedadam", "online-hypergradient", "sgd", "adam"),
        ("feddisco-fedprox", "feddisco", "prox", "sgd"),
        ("afl", "afl", "sgd", "sgd"),
        ("fedawa", "fedawa", "sgd", "sgd"),
        ("fedlws", "size", "sgd", "fedlws"),
        ("feddisco-fedlws", "feddisco", "sgd", "fedlws"),
    ],
)
def test_a_method_is_read_from_its_end(name: str, rule: str, local: str, server: str) -> None:
    """A rule's name may have a hyphen."""
    found = method(name)
    assert name in method_names()
    assert (found.rule and found.rule.name, found.algorithm.local.name) == (rule, local)
    assert found.algorithm.server.name == server


def test_rivals_take_settings_from_text() -> None:
    texts = ("q-fedavg:q=2,lr=0.1", "feddisco:a=0.2,distance=l2", "online-hypergradient:step_size=3", "afl:gamma=0.5")
    assert [RULES.parse(text).name for text in texts] == [
        "q-fedavg(q=2, lr=0.1)",
        "feddisco(a=0.2, b=0.1, distance=l2)",
        "online-hypergradient(step_size=3)",
        "afl(gamma=0.5)",
    ]


def test_another_packages_rule_is_a_method(install: Install) -> None:
    """By a prefix, and in the place of a method's rule."""
    install(("fedunfold.rules", "fair", lambda q=2.0: dr(q)))
    assert "fair-fednova" in method_names()
    found = method("fair-fednova")
    assert found.rule is not None
    assert found.rule.name == dr(2.0).name
    assert found.algorithm.local.name == "nova"
    other = changed(method("fedavg"), rule="fair:q=3")
    assert other.rule is not None
    assert other.rule.name == dr(3).name


@dataclass(frozen=True)
class Largest(ClientSampler):
    """The clients with the most data."""

    name: ClassVar[str] = "largest"

    def sample(self, tickets: np.ndarray, known: KnownClients, count: int) -> np.ndarray:
        return np.argsort(-known.num_examples)[:count]


def test_another_packages_sampler_is_drawn_by(install: Install) -> None:
    install(("fedunfold.client_samplers", "largest", Largest))
    env = tiny(clients_per_round=2).replace(client_sampler="largest")
    for t in range(3):
        assert participation(env, "trial-0", t).cohort.tolist() == [True, False, True]
    with pytest.raises(InputError, match="unknown client sampler 'smallest'"):
        env.replace(client_sampler="smallest")


@dataclass(frozen=True)
class Gullible(Largest):
    """Requires what no client reports."""

    name: ClassVar[str] = "gullible"
    required_metrics: ClassVar[frozenset[Any]] = frozenset({"honesty", "norm"})


def test_a_sampler_that_requires_what_nobody_reports_is_refused(install: Install) -> None:
    install(("fedunfold.client_samplers", "gullible", Gullible))
    with pytest.raises(InputError, match=r"'gullible' requires 'honesty', which is no number .* choose among loss,"):
        tiny(clients_per_round=2).replace(client_sampler="gullible")
