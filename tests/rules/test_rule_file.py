"""Pre-trained rules as files: what comes back, the same bytes, and one sentence for what is no rule."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.io.checkpoint import NO_CHECKSUM, DamagedError, embed_checksum
from fedunfold.rules.features import CLIENT_FEATURES, ROUND_FEATURES
from fedunfold.rules.rule_file import FORMAT, is_rule_file, load_rule, save_rule
from fedunfold.rules.unfolded import UnfoldedRule, initial_parameters
from tests.rules.test_learned import learned
from tests.support.rules import small_rule


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rule.safetensors"
    save_rule(small_rule(), path)
    return path


def changed(file: Path, header: dict[str, Any] | None = None, **tensors: Tensor | None) -> None:
    """The file with other fields of its header, or other tensors, and a checksum that holds."""
    with safe_open(file, framework="pt") as opened:
        fields = json.loads(opened.metadata()["fedunfold"]) | {"checksum": NO_CHECKSUM} | (header or {})
    found = {name: value for name, value in (load_file(file) | tensors).items() if value is not None}
    file.write_bytes(embed_checksum(save(found, {"fedunfold": json.dumps(fields, sort_keys=True)})))


def refusal(file: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_rule(file)
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


def test_what_is_saved_comes_back(file: Path) -> None:
    rule, found = small_rule(), load_rule(file)
    assert (found.name, found.description, found.algorithm) == (rule.name, rule.description, rule.algorithm)
    assert found.ranges is not None and rule.ranges is not None
    assert torch.equal(found.ranges, rule.ranges)
    assert found.params.keys() == rule.params.keys()
    assert all(torch.equal(found.params[name], value) for name, value in rule.params.items())
    assert {value.dtype for value in found.params.values()} == {torch.float64}
    assert found.horizon is None


def test_the_same_rule_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    again, loaded = tmp_path / "again.safetensors", tmp_path / "loaded.safetensors"
    rule = small_rule()
    save_rule(replace(rule, params=dict(sorted(rule.params.items(), reverse=True))), again)
    save_rule(load_rule(file), loaded)
    assert file.read_bytes() == again.read_bytes() == loaded.read_bytes()


@pytest.mark.parametrize("change", [{"algorithm": None}, {"ranges": None}])
def test_a_rule_that_does_not_know_what_it_is_for_is_not_saved(change: dict[str, None], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'small@1' has no algorithm or no ranges"):
        save_rule(small_rule(**change), tmp_path / "rule.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_rule_of_another_kind_is_not_saved(tmp_path: Path) -> None:
    class Other(UnfoldedRule):
        pass

    rule = small_rule()
    with pytest.raises(InputError, match="a rule of the type Other has no file; save one of network"):
        save_rule(Other(rule.params, ranges=rule.ranges, algorithm=rule.algorithm), tmp_path / "rule.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -200, -8, -1])
def test_a_file_that_is_cut_short_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    assert "is damaged or not one of fedunfold's" in refusal(file)


def test_a_bit_that_has_changed_is_noticed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match="its checksum does not hold"):
        load_rule(file)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    learned().save(file)
    assert "is damaged or not one of fedunfold's" in refusal(file)
    file.write_bytes(b"PK\x03\x04")
    assert "is damaged or not one of fedunfold's" in refusal(file)
    assert "there is no rule file" in refusal(tmp_path / "missing.safetensors")
    assert "there is no rule file" in refusal(tmp_path)


def test_a_rule_file_is_told_from_learned_weights(file: Path, tmp_path: Path) -> None:
    learned().save(tmp_path / "weights.safetensors")
    assert is_rule_file(file)
    assert not is_rule_file(tmp_path / "weights.safetensors")
    assert not is_rule_file(tmp_path / "missing.safetensors")


ALGORITHM = Algorithm().describe()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": FORMAT + 1}, f"has format {FORMAT + 1}; this version reads {FORMAT}"),
    "another kind": ({"kind": "tree"}, "kind"),
    "an unknown field": ({"colour": "red"}, "colour"),
    "an unknown feature": ({"client_features": ["size", "mood"]}, "reads the feature 'mood'"),
    "too few features": ({"client_features": CLIENT_FEATURES[:-1]}, "other names or shapes"),
    "no features": ({"round_features": []}, "a rule of the kind 'network' reads other features"),
    "what secure sums do not show": ({"kind": "private-network"}, "of the kind 'private-network' reads other features"),
    "an unknown server": ({"algorithm": ALGORITHM | {"server": {"name": "zeus"}}}, "zeus"),
    "no server": ({"algorithm": {}}, "is damaged"),
    "a name with a line end": ({"name": "a\nb"}, "its name is"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_header_that_cannot_be_used_is_refused(file: Path, which: str) -> None:
    header, said = WRONG[which]
    changed(file, header)
    assert said in refusal(file)


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor | None]], str]] = {
    "one is missing": (lambda t: {"params.score.1.bias": None}, "other names or shapes"),
    "one too many": (lambda t: {"params.extra": torch.ones(1)}, "other names or shapes"),
    "another shape": (lambda t: {"params.step.1.bias": torch.ones(2)}, "other names or shapes"),
    "a bias without end": (lambda t: {"params.encoder.0.bias": torch.ones(10**5)}, "other names or shapes"),
    "no ranges": (lambda t: {"ranges": None}, "is damaged"),
    "ranges of something else": (lambda t: {"ranges": t["ranges"][:, 1:].contiguous()}, "its ranges"),
    "ranges upside down": (lambda t: {"ranges": t["ranges"].flip(0).contiguous()}, "its ranges"),
    "not finite": (lambda t: {"params.score.1.bias": torch.tensor([float("nan")])}, "not finite"),
    "whole numbers": (lambda t: {"params.score.1.bias": torch.ones(1, dtype=torch.int64)}, "is damaged"),
}


def test_a_rule_may_read_fewer_features_than_this_version_computes(tmp_path: Path) -> None:
    """As do those that were learned before there were others."""
    some = ROUND_FEATURES[2:]
    params, bound = initial_parameters(4, 0, len(CLIENT_FEATURES), len(some)), torch.ones(len(CLIENT_FEATURES + some))
    ranges = torch.stack([-bound, bound])
    save_rule(
        UnfoldedRule(params, ranges=ranges, algorithm=Algorithm(), round_features=some), tmp_path / "rule.safetensors"
    )
    assert load_rule(tmp_path / "rule.safetensors").round_features == some


@pytest.mark.parametrize("which", TENSORS)
def test_tensors_that_cannot_be_used_are_refused(file: Path, which: str) -> None:
    change, said = TENSORS[which]
    changed(file, None, **change(load_file(file)))
    assert said in refusal(file)


def test_a_file_beyond_the_limit_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDUNFOLD_MAX_RULE_BYTES", "100")
    assert "set FEDUNFOLD_MAX_RULE_BYTES" in refusal(file)
