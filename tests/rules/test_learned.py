"""Learned weights as files and as a rule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedunfold.core.errors import InputError, WriteError
from fedunfold.rules import WeightingRule
from fedunfold.rules.learned import FORMAT, LearnedWeights
from fedunfold.version import VERSION
from tests.support.reports import report

WEIGHTS = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]


def matrix(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def learned(**changes: Any) -> LearnedWeights:
    """Two rounds of clients a, b and c, after one iteration."""
    given: dict[str, Any] = {
        "client_ids": ("a", "b", "c"),
        "weights": matrix(*WEIGHTS),
        "losses": matrix(7.25),
        "history": matrix([[0.25, 0.25, 0.5]] * 2, WEIGHTS),
        "settings": {"rounds": 2, "learning": {"lr": 0.03, "outer": "path"}},
        "digest": "d1",
    }
    return LearnedWeights(**given | changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    learned().save(path)
    return path


def rewritten(file: Path, header: dict[str, Any] | None = None, **tensors: Tensor) -> None:
    """The file with other fields of its header, or other tensors."""
    fields = {
        "format": FORMAT,
        "client_ids": ["a", "b", "c"],
        "rounds": 2,
        "settings": {},
        "digest": "d1",
        "version": VERSION,
    }
    metadata = {"fedunfold": json.dumps(fields | (header or {}))}
    save_file(load_file(file) | tensors, file, metadata)


def refusal(path: Path) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(InputError) as caught:
        LearnedWeights.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# --- files -------------------------------------------------------------------------------------------------


def test_round_trip(file: Path) -> None:
    before, after = learned(), LearnedWeights.load(file)
    for name in ("weights", "losses", "history"):
        assert torch.equal(getattr(after, name), getattr(before, name))
        assert getattr(after, name).dtype == torch.float64
    for name in ("client_ids", "settings", "digest", "version", "name", "required_metrics"):
        assert getattr(after, name) == getattr(before, name)
    assert after.version == VERSION


def test_the_same_weights_give_the_same_bytes(file: Path, tmp_path: Path) -> None:
    again, loaded = tmp_path / "again", tmp_path / "loaded"
    learned(settings={"learning": {"outer": "path", "lr": 0.03}, "rounds": 2}).save(again)
    LearnedWeights.load(file).save(loaded)
    assert file.read_bytes() == again.read_bytes() == loaded.read_bytes()


def test_strided_weights_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    weights = matrix([0.5, 0.1], [0.3, 0.6], [0.2, 0.3]).T
    learned(weights=weights).save(str(path))
    assert torch.equal(LearnedWeights.load(str(path)).weights, matrix(*WEIGHTS))


def test_saving_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WriteError, match="cannot write"):
        learned().save(tmp_path / "file" / "weights.safetensors")


def test_no_file(tmp_path: Path) -> None:
    assert "there is no weights file" in refusal(tmp_path / "none.safetensors")
    assert "there is no weights file" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -200, -8, -1])
def test_truncated(file: Path, kept: int) -> None:
    """Negative: so many bytes are missing at the end."""
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    assert "damaged or not one of fedunfold's" in refusal(file)


@pytest.mark.parametrize("content", [b"garbage", b"\x00" * 500, b"\xff" * 500, b"{}", b"PK\x03\x04" + b"x" * 200])
def test_garbage(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert "damaged or not one of fedunfold's" in refusal(file)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"fedunfold": "{"},
        {"fedunfold": "[]"},
        {"fedunfold": "{}"},
        {"fedunfold": f'{{"format": {FORMAT}}}'},
    ],
)
def test_a_file_of_something_else(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"layer.weight": torch.ones(2, 2)}, path, metadata)
    assert "damaged or not one of fedunfold's" in refusal(path)


def test_missing_tensors(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weights": matrix(*WEIGHTS)}, path)
    rewritten(path)
    assert "damaged" in refusal(path)


def test_another_format(file: Path) -> None:
    rewritten(file, {"format": 99})
    assert f"has format 99; this version reads {FORMAT}" in refusal(file)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.6, 0.3, 0.2], "round 1 gives weights that sum to 1.1 instead of 1"),
        ([1.2, -0.4, 0.2], "round 1 gives 'b' the weight -0.4"),
        ([torch.nan, 0.5, 0.5], "round 1 gives 'a' the weight nan"),
        ([torch.inf, 0.0, 0.0], "round 1 gives 'a' the weight inf"),
    ],
)
def test_weights_off_the_simplex(file: Path, row: list[float], message: str) -> None:
    rewritten(file, weights=matrix(WEIGHTS[0], row))
    assert message in refusal(file)


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        ({"client_ids": ["a", "b"]}, {}),
        ({"client_ids": ["a", "b", "b"]}, {}),
        ({}, {"weights": matrix([0.5, 0.5], [0.4, 0.6])}),
        ({}, {"weights": matrix(*WEIGHTS)[0]}),
        ({}, {"weights": torch.empty(0, 3)}),
        ({}, {"losses": matrix(7.0, 6.0)}),
        ({}, {"history": matrix(WEIGHTS)}),
        ({}, {"history": matrix([WEIGHTS[0]] * 3, [WEIGHTS[0]] * 3)}),
    ],
)
def test_shapes_that_do_not_fit_together(file: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    rewritten(file, header, **tensors)
    assert "inconsistent" in refusal(file)


def test_single_precision_weights_are_taken(file: Path) -> None:
    rewritten(file, weights=matrix(*WEIGHTS).float())
    loaded = LearnedWeights.load(file)
    assert loaded.weights.dtype == torch.float64
    torch.testing.assert_close(loaded.weights, matrix(*WEIGHTS), rtol=1e-6, atol=1e-6)


# --- as a rule ---------------------------------------------------------------------------------------------


def test_it_is_a_rule() -> None:
    rule = learned()
    assert isinstance(rule, WeightingRule)
    assert rule.required_metrics == frozenset()
    for t, row in enumerate(WEIGHTS):
        weights, state = rule(report([1, 1, 1], round=t), None)
        assert weights.tolist() == row
        assert state is None


def test_rounds_beyond_the_last_are_refused() -> None:
    with pytest.raises(InputError, match="learned for 2 rounds and have none for round 2"):
        learned()(report([1, 1, 1], round=2), None)


@pytest.mark.parametrize(("keys", "named"), [("abd", "'d'"), ("ab", "'c'"), ("bac", "in another order")])
def test_other_clients_are_refused(keys: str, named: str) -> None:
    with pytest.raises(InputError, match="belong to another federation") as caught:
        learned()(report([1] * len(keys), client_ids=list(keys)), None)
    assert named in str(caught.value)


# --- for another federation --------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("digest", ["d1", ""])
def test_the_same_federation_takes_them_as_they_are(mapped: bool, digest: str) -> None:
    weights = learned()
    assert weights.adapt(["a", "b", "c"], 2, digest, allow_mapping=mapped) is weights


@pytest.mark.parametrize(
    ("keys", "rounds", "digest", "message"),
    [
        ("abd", 2, "d1", "clients are a, b, c, the run's are a, b, d ('d' is in only one of them)"),
        ("ab", 2, "d1", "('c' is in only one of them)"),
        ("cba", 2, "d1", "(in another order)"),
        ("abc", 3, "d1", "learned for 2 rounds and the run has 3"),
        ("abc", 1, "d1", "learned for 2 rounds and the run has 1"),
        ("abc", 2, "d2", "same client keys, other data, epochs"),
    ],
)
def test_another_federation_is_refused(keys: str, rounds: int, digest: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        learned().adapt(list(keys), rounds, digest)
    assert message in str(caught.value)
    assert "map" in str(caught.value)
    assert "--" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mapped_by_key() -> None:
    """c and a alone: 0.2 and 0.5 of 0.7, then 0.3 and 0.1 of 0.4."""
    source = learned()
    mapped = source.adapt(["c", "a"], 2, "d2", allow_mapping=True)
    assert mapped.client_ids == ("c", "a")
    assert mapped.digest == "d2"
    torch.testing.assert_close(mapped.weights, matrix([2 / 7, 5 / 7], [0.75, 0.25]))
    torch.testing.assert_close(mapped.history[0], matrix([2 / 3, 1 / 3], [2 / 3, 1 / 3]))
    torch.testing.assert_close(mapped.history[-1], mapped.weights)
    assert torch.equal(mapped.losses, source.losses)
    assert torch.equal(source.weights, matrix(*WEIGHTS))


def test_mapped_to_more_rounds_the_last_row_repeats() -> None:
    mapped = learned().adapt(["a", "b", "c"], 4, "d1", allow_mapping=True)
    torch.testing.assert_close(mapped.weights, matrix(WEIGHTS[0], *[WEIGHTS[1]] * 3))
    assert mapped.history.shape == (2, 4, 3)
    assert mapped(report([1, 1, 1], round=3), None)[0].tolist() == pytest.approx(WEIGHTS[1])


def test_mapped_to_fewer_rounds_the_first_rows_stay() -> None:
    mapped = learned().adapt(["a", "b", "c"], 1, "d1", allow_mapping=True)
    torch.testing.assert_close(mapped.weights, matrix(WEIGHTS[0]))


def test_mapped_to_other_data_the_weights_stay() -> None:
    mapped = learned().adapt(["a", "b", "c"], 2, "d2", allow_mapping=True)
    torch.testing.assert_close(mapped.weights, matrix(*WEIGHTS))
    assert mapped.adapt(["a", "b", "c"], 2, "d2") is mapped


def test_mapped_weights_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    mapped = learned().adapt(["b", "a"], 5, "d2", allow_mapping=True)
    mapped.save(path)
    loaded = LearnedWeights.load(path)
    assert loaded.client_ids == ("b", "a")
    assert torch.equal(loaded.weights, mapped.weights)


def test_an_unknown_client_cannot_be_mapped() -> None:
    with pytest.raises(InputError, match=r"client 'x' was not in .* \(a, b, c\)"):
        learned().adapt(["a", "x"], 2, "d1", allow_mapping=True)


def test_clients_without_weight_cannot_be_mapped() -> None:
    weights = learned(weights=matrix([0.5, 0.3, 0.2], [1.0, 0.0, 0.0]))
    with pytest.raises(InputError, match="weight 0 in one of the rounds"):
        weights.adapt(["b", "c"], 2, "d1", allow_mapping=True)
