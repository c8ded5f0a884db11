"""Rules by name: those of the package, a user's file, and what there is no rule for."""

import tomllib
from pathlib import Path

import pytest

import fedunfold as fu
from fedunfold.core.errors import InputError
from fedunfold.rules import pretrained as module
from fedunfold.rules.pretrained import pretrained_names
from fedunfold.rules.rule_file import save_rule
from fedunfold.rules.unfolded import PrivateRule
from tests.support.federations import tiny
from tests.support.rules import small_rule

PACKAGE = Path(fu.__file__).parent
LARGEST = 200_000


def test_the_shipped_rules_are_small_and_in_the_wheel() -> None:
    shipped = sorted((PACKAGE / "rules" / "shipped").iterdir())
    assert shipped and all(file.stat().st_size <= LARGEST for file in shipped)
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["fedunfold"]
    assert all(any(file.relative_to(PACKAGE).match(pattern) for pattern in patterns) for file in shipped)


@pytest.mark.parametrize("name", pretrained_names())
def test_a_shipped_rule_says_what_it_is(name: str) -> None:
    rule = fu.pretrained(name)
    assert rule.name == name
    assert rule.algorithm is not None and rule.ranges is not None
    assert rule.algorithm.local.name == "sgd"
    assert rule.description
    assert name in repr(rule) and "tensor(" not in repr(rule)


def test_the_private_one_needs_no_update_alone() -> None:
    rule = fu.pretrained("private")
    assert type(rule) is PrivateRule and rule.required_metrics == {"norm"}
    assert rule.algorithm is not None and rule.algorithm.absent == "drop"


def test_without_a_number_it_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rules" / "shipped"
    for version in (2, 10, 9):
        save_rule(small_rule(name=f"open@{version}"), folder / f"open-{version}.safetensors")
    monkeypatch.setattr(module, "files", lambda _: tmp_path)
    assert fu.pretrained("open").name == "open@10"
    assert fu.pretrained("open@9").name == "open@9"
    assert pretrained_names() == ("open@2", "open@9", "open@10")


def test_a_rule_of_ones_own_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rule(small_rule(), tmp_path / "rule.safetensors")
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "rule.safetensors", "rule.safetensors", str(tmp_path / "rule.safetensors")):
        assert fu.pretrained(given).name == "small@1"


def test_another_name_is_refused_with_the_choices() -> None:
    with pytest.raises(
        InputError, match=r"no pre-trained rule 'closed'; choose among open, private, open@1, private@1, or give"
    ):
        fu.pretrained("closed")
    with pytest.raises(
        InputError, match=r"no pre-trained rule 'open@77'; choose among open, private, open@1, private@1, or give"
    ):
        fu.pretrained("open@77")
    with pytest.raises(InputError, match="there is no rule file"):
        fu.pretrained("runs/closed.safetensors")


def test_the_method_fedunfold_is_the_rule_with_its_server() -> None:
    rule, method = fu.pretrained(), fu.method("fedunfold")
    assert method.rule is not None and method.rule.name == rule.name
    assert method.algorithm == rule.algorithm
    assert fu.method("open@1").algorithm == rule.algorithm


def test_a_rule_brings_its_server_to_a_run() -> None:
    rule, env = small_rule(), tiny(rounds=3)
    ours = fu.run(env, rule)
    assert rule.algorithm is not None
    same = fu.run(env, fu.Method("mine", rule.algorithm, rule))
    plain = fu.run(env, fu.Method("plain", fu.Algorithm(absent="remember"), rule))
    assert ours.model.equal(same.model)
    assert not ours.model.equal(plain.model)
