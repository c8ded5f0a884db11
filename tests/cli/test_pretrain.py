"""`fedunfold pretrain`: a rule from a file of settings, resumed to the same bytes, and one line for what is wrong."""

import json
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import fedunfold as fu
from fedunfold.cli.trackers import ProgressTracker
from fedunfold.rules.rule import describe_rule
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused

SETTINGS = """\
name = "tiny@2"
steps = 4
federations = 2
validation = 3
every = 2
width = 4
server = "momentum:beta=0.3"

[distribution]
rounds = [3, 4]
samples = [80, 120]
clients = [3, 4]
sampled_clients = [5, 6]
cohort = [2, 3]
features = [4, 6]
digits = 0.0
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(SETTINGS, encoding="utf-8")
    return file


def interrupt_after(steps: int, patched: pytest.MonkeyPatch) -> None:
    report = ProgressTracker.on_pretraining_step

    def reported(self: ProgressTracker, step: int, most: int, values: Mapping[str, float]) -> None:
        report(self, step, most, values)
        if step == steps:
            signal.raise_signal(signal.SIGINT)

    patched.setattr(ProgressTracker, "on_pretraining_step", reported)


@pytest.mark.slow
def test_a_rule_of_ones_own_from_settings_to_a_run(fedunfold: Command, settings: Path, tmp_path: Path) -> None:
    made = fedunfold("pretrain", settings, "--out", "rule", "--processes", 1, "--format", "json")
    assert made.code == 0, made.err
    found, folder = made.json, tmp_path / "rule"
    assert (found["name"], found["steps"], len(found["losses"])) == ("tiny@2", 4, 4)
    assert [each["step"] for each in found["validations"]] == [2, 4]
    assert found["chosen"] in found["validations"]
    names = {"rule.safetensors", "settings.toml", "card.md", "settings.json"}
    assert {path.name for path in folder.iterdir()} == names
    rule = fu.pretrained(folder / "rule.safetensors")
    assert rule.name == "tiny@2"
    assert rule.algorithm is not None and rule.algorithm.absent == "remember"
    assert rule.algorithm.server.describe() == {"name": "momentum", "beta": 0.3, "lr": 1.0}
    assert describe_rule(rule)["parameters"] == found["parameters"]
    given, written = tomllib.loads(SETTINGS), tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))
    assert written["distribution"].items() >= given.pop("distribution").items()
    assert written.items() >= given.items()
    card = (folder / "card.md").read_text(encoding="utf-8")
    assert card.startswith("# tiny@2\n")
    assert f"| mean gain, last rounds | {found['chosen']['mean']:+.2f} |" in card
    assert "`momentum:beta=0.3`" in card and "| effort | round |" in card

    # The same again, by the same command in another folder; then what the rule is for.
    repeated = fedunfold("repeat", "rule")
    assert repeated.out.startswith("same: rule.safetensors, settings.toml, card.md"), repeated.err
    again = fedunfold("pretrain", settings, "--out", "rule")
    refused(again, "already holds a run")
    for command in (("run", "--weights", "rule/rule.safetensors"), ("compare", "--trials", 1, "--methods")):
        name, *options = command
        more = ["fedavg,rule/rule.safetensors"] if name == "compare" else []
        ran = fedunfold(name, "digits-label-skew", "--rounds", 2, *options, *more, "--out", name, "--format", "json")
        assert ran.code == 0, ran.err
        recorded = json.loads((tmp_path / name / "settings.json").read_text(encoding="utf-8"))["rules"]["tiny@2"]
        assert recorded == {"rule": "tiny@2", "weights": None, "parameters": found["parameters"]}
    assert fedunfold("repeat", "run").out.startswith("same: ")
    assert "read its card.md" in fedunfold("report", "rule").err


@pytest.mark.slow
def test_what_was_stopped_is_resumed_to_the_same_bytes(
    fedunfold: Command, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("pretrain", settings, "--processes", 1, "--name", "mine@1")
    assert fedunfold(*line, "--out", "whole").code == 0
    with monkeypatch.context() as patched:
        interrupt_after(3, patched)
        stopped = fedunfold(*line, "--out", "cut")
    assert (stopped.code, stopped.err) == (130, "stopped after 3 of 4 steps; the same command resumes.\n")
    assert not (tmp_path / "cut" / "rule.safetensors").exists()
    refused(fedunfold("pretrain", settings, "--out", "cut", "--name", "other@1"), "unfinished run of other settings")
    resumed = fedunfold(*line, "--out", "cut", "--resume")
    assert resumed.code == 0, resumed.err
    for name in ("rule.safetensors", "card.md", "settings.toml"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "mine@1 is the rule after step" in resumed.out


def test_it_is_followed_in_tensorboard(fedunfold: Command, settings: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = fedunfold(
        "pretrain", settings, "--out", "rule", "--processes", 1, "--track", f"tensorboard:{tmp_path / 'tb'}"
    )
    assert done.code == 0, done.err
    events = EventAccumulator(str(tmp_path / "tb" / "rule")).Reload()
    assert [event.step for event in events.Scalars("pretraining/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("pretraining/validation_mean")] == [2, 4]


WRONG = {
    "an unknown field": ("stepps = 4\n", "settings.toml: field stepps: is not a known field"),
    "an unknown field of the distribution": (
        "[distribution]\ncolour = 1\n",
        "field distribution.colour: is not",
    ),
    "too small a number": ("steps = 0\n", "settings.toml: field steps: must be at least 1, got 0"),
    "no TOML": ("steps = \n", "settings.toml: is not valid TOML"),
    "an unknown server": ('server = "zeus"\n', "settings.toml: field server: unknown server optimiser 'zeus'"),
    "a name that is none": ('name = "a b"\n', "settings.toml: field name: "),
}


@pytest.mark.parametrize("which", WRONG)
def test_settings_that_cannot_be_used_are_refused(fedunfold: Command, tmp_path: Path, which: str) -> None:
    text, said = WRONG[which]
    (tmp_path / "settings.toml").write_text(text, encoding="utf-8")
    outcome = fedunfold("pretrain", "settings.toml", "--out", "rule")
    refused(outcome, said)
    assert not (tmp_path / "rule").exists()


def test_what_is_not_there_is_refused(fedunfold: Command) -> None:
    refused(fedunfold("pretrain", "missing.toml"), "there is no settings file missing.toml")
    refused(fedunfold("pretrain", "--resume", "--out", "rule"), "holds no run to resume")


def test_a_pre_trained_rule_is_not_learned(fedunfold: Command) -> None:
    refused(fedunfold("learn", "digits-label-skew", "--method", "fedunfold"), "method fedunfold needs no learning")
