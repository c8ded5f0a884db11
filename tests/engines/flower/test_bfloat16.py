"""Updates in bfloat16 on the wire: half the bytes, within the rounding that is stated, for those who ask for it."""

import random
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.engines.flower import WeightedStrategy, bfloat16_mod
from fedunfold.engines.flower.bfloat16 import BFLOAT16, _as_update, read_update
from tests.engines.flower.test_hooks import assert_alike
from tests.support.grid import LocalGrid

NODES: dict[int, dict[str, Any]] = {1: {"n": 10}, 2: {"n": 20}, 3: {"n": 30}}
SIZES = np.array([10, 20, 30]) / 60


def begin() -> ArrayRecord:
    draw = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {"layer": draw.normal(size=(50, 40)).astype(np.float32)}
    values |= {"w": draw.normal(size=(3, 4)), "half": draw.normal(size=5).astype(np.float16), "n": np.array([3, 4])}
    return ArrayRecord({name: Array(array) for name, array in values.items()})


def changed(values: np.ndarray, node: int, t: int) -> np.ndarray:
    if values.dtype.kind != "f":
        return values + node
    draw = np.random.default_rng([node, t, values.size])
    return (values + 0.01 * draw.normal(size=values.shape)).astype(values.dtype)


def app_of(mod: bool, only: int | None = None) -> ClientApp:
    def maybe(message: Message, context: Context, call_next: Any) -> Message:
        return (
            bfloat16_mod(message, context, call_next)
            if only in (None, context.node_id)
            else call_next(message, context)
        )

    app = ClientApp(mods=[maybe] if mod else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (arrays,), config = message.content.array_records.values(), message.content.config_records["config"]
        t = config["server-round"]
        moved = {name: Array(changed(a.numpy(), context.node_id, t)) for name, a in arrays.items()}  # type: ignore[arg-type]
        metrics = MetricRecord({"num-examples": int(context.node_config["n"])})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app


def run(strategy: FedAvg, app: ClientApp, rounds: int = 1) -> tuple[Any, int]:
    """The result, and the bytes of arrays that came back."""
    received = 0

    def count(reply: Message, node: int) -> Message:
        nonlocal received
        received += sum(len(a.data) for record in reply.content.array_records.values() for a in record.values())
        return reply

    random.seed(0)  # FedAvg adds up in the order of its messages, which half precision shows
    return strategy.start(LocalGrid(app, NODES, count), begin(), num_rounds=rounds), received


def strategy(**settings: Any) -> WeightedStrategy:
    return WeightedStrategy(fu.size(), fraction_evaluate=0.0, **settings)


def test_a_round_within_the_rounding() -> None:
    exact, whole = run(strategy(), app_of(mod=True))
    rounded, half = run(strategy(update_precision="bfloat16"), app_of(mod=True))
    first = {name: array.numpy() for name, array in begin().items()}
    for name in ("layer", "w"):
        found, expected = rounded.arrays[name].numpy(), exact.arrays[name].numpy()
        assert found.dtype == expected.dtype == first[name].dtype
        updates = np.stack([changed(first[name], node, 1) - first[name] for node in NODES])
        bound = 2.0**-8 * np.tensordot(SIZES, np.abs(updates), 1)
        precision = np.abs(first[name]) * 2 * np.finfo(found.dtype).eps
        assert (np.abs(found - expected) <= bound + precision).all()
        assert (found != expected).any(), "it was rounded"
    for name in ("half", "n"):
        np.testing.assert_array_equal(rounded.arrays[name].numpy(), exact.arrays[name].numpy())
    assert half < 0.53 * whole, "half, and the names and shapes"


def test_only_who_has_the_mod_sends_them() -> None:
    exact, whole = run(strategy(), app_of(mod=False), rounds=3)
    for app, share in ((app_of(mod=False), 1.0), (app_of(mod=True, only=2), 0.84)):
        found, received = run(strategy(update_precision="bfloat16"), app, rounds=3)
        assert share * whole - 1000 < received < share * whole + 1000
        for name, array in exact.arrays.items():
            np.testing.assert_allclose(found.arrays[name].numpy(), array.numpy(), atol=1e-3)


def test_flowers_strategy_gets_what_the_function_replies() -> None:
    (ours, _), (theirs, _) = (run(FedAvg(fraction_evaluate=0.0), app_of(mod=mod), rounds=2) for mod in (True, False))
    assert_alike(ours, theirs)


def test_what_is_not_one(caplog: pytest.LogCaptureFixture) -> None:
    def spoil(reply: Message, node: int) -> Message:
        arrays = reply.content.array_records["arrays"]
        layer = arrays["layer"]
        if node == 1:
            arrays["layer"] = Array(BFLOAT16, layer.shape, layer.stype, Array(np.zeros((50, 40), np.float32)).data)
        if node == 2:
            arrays["layer"] = Array(BFLOAT16, (2,), layer.stype, Array(np.zeros(2, np.uint16)).data)
        return reply

    chosen = strategy(update_precision="bfloat16")
    chosen.start(LocalGrid(app_of(mod=True), NODES, spoil), begin(), num_rounds=1)
    assert chosen.weights == [{"node:3": 1.0}]
    assert "has an array 'layer' that says it is bfloat16, of type float32" in caplog.text
    assert "has 'layer' of shape [2] in place of [50, 40], the initial one" in caplog.text


def test_another_precision_is_refused() -> None:
    with pytest.raises(InputError, match="update_precision='bfloat16' or None, not 'float8'"):
        strategy(update_precision="float8")


@given(st.floats(-(2.0**100), 2.0**100), st.floats(-(2.0**100), 2.0**100))
def test_any_entry_is_off_by_its_share(sent: float, change: float) -> None:
    before = np.array([sent], np.float64)
    found = read_update(_as_update(Array(before + change), Array(before)), "w", before)
    told = (before + change) - before
    smallest = np.finfo(np.float32).tiny  # below it bfloat16 has fewer bits
    assert abs(found - before - told) <= 2.0**-8 * abs(told) + smallest + 4 * np.finfo(np.float64).eps * abs(before)
