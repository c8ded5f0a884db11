"""Values of any shape where settings are expected, and words of any kind where a part is described."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedunfold.config import Environment
from fedunfold.core.errors import MAX_CHARACTERS, InputError
from fedunfold.core.parts import AGGREGATORS, LOCAL_OPTIMIZERS, SERVER_OPTIMIZERS
from fedunfold.core.registry import Registry
from fedunfold.io.limits import CLIENTS
from fedunfold.rules.rule import RULES
from fedunfold.training.methods import changed, method

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)
FIELDS: dict[str, Any] = {
    "name": "mine",
    "rounds": 3,
    "batch_size": 4,
    "lr": 0.1,
    "clients_per_round": 2,
    "model": {"hidden": [4]},
    "data": {"source": "digits"},
    "partition": {"kind": "iid"},
    "clients": [{"key": "a", "count": 2}, {"key": "b", "epochs": 2}],
}


@given(st.sampled_from([*FIELDS, "seed", "paper", "self", "other"]), VALUES)
def test_any_value_in_any_field_is_valid_or_refused(field: str, value: Any) -> None:
    try:
        env = Environment(**{**FIELDS, field: value})
    except InputError as error:
        assert str(error).isprintable()
        assert len(str(error)) <= MAX_CHARACTERS + 100
    else:
        assert 1 <= len(env.clients) <= CLIENTS.value


def test_a_number_too_long_to_print_is_refused_in_a_line() -> None:
    for field in FIELDS:
        with pytest.raises(InputError, match="field"):
            Environment(**{**FIELDS, field: 10**5000})


@given(
    st.sampled_from([LOCAL_OPTIMIZERS, SERVER_OPTIMIZERS, RULES, AGGREGATORS]),
    st.one_of(st.text(), st.from_regex(r"[a-z-]{1,9}(:[a-z0-9]{1,5}=[-+.a-z0-9]{0,8}){0,2}", fullmatch=True)),
)
def test_any_description_of_a_part_is_one_or_refused(parts: Registry[Any], text: str) -> None:
    try:
        parts.parse(text)
    except InputError as error:
        assert str(error).isprintable()


@given(st.sampled_from(["local", "rule", "server", "absent", "filter", "aggregator"]), st.text())
def test_any_change_of_a_method_is_one_or_refused(which: str, text: str) -> None:
    try:
        changed(method("fedavg"), **{which: text})
    except InputError as error:
        assert str(error).isprintable()


@given(st.text())
def test_a_message_is_one_line_whatever_it_names(name: str) -> None:
    assert str(InputError(f"file {name}: is wrong")).isprintable()


def test_a_message_keeps_what_can_be_printed() -> None:
    assert str(InputError("Θ of client 'ö' must be ≥ 0")) == "Θ of client 'ö' must be ≥ 0"
    with pytest.raises(InputError, match=r"a\\nb\\x1b\[2J"):
        raise InputError("a\nb\x1b[2J")
