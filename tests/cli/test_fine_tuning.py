"""`fedunfold learn --from`: a rule adapted to one federation, its folder, and one line for what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedunfold as fu
from fedunfold.cli.trackers import ProgressTracker
from fedunfold.rules.rule import describe_rule
from fedunfold.rules.rule_file import save_rule
from tests.cli.conftest import Command
from tests.cli.test_bad_input import refused
from tests.support.rules import small_rule

ENV = ("learn", "digits-label-skew", "--rounds", 3)
LINE = (*ENV, "--from", "pretrained")


def interrupt_after(steps: int, patched: pytest.MonkeyPatch) -> None:
    report = ProgressTracker.on_fine_tuning_step

    def reported(self: ProgressTracker, step: int, most: int, loss: float) -> None:
        report(self, step, most, loss)
        if step == steps:
            raise KeyboardInterrupt

    patched.setattr(ProgressTracker, "on_fine_tuning_step", reported)


def test_from_the_shipped_rule_to_a_comparison(fedunfold: Command, tmp_path: Path) -> None:
    made = fedunfold(*LINE, "--out", "tuned")
    assert made.code == 0, made.err
    *_, verdict, price, hint = made.out.splitlines()
    assert verdict.startswith("open@1-tuned: the validation loss fell from ")
    assert verdict.endswith("; in tuned/rule.safetensors")
    assert price == "price: 10 runs of the federation"
    compared = "fedunfold compare digits-label-skew --methods fedavg,fedunfold,tuned/rule.safetensors --rounds 3"
    assert hint == f"to see what it brings: {compared}"
    assert fedunfold(*compared.split()[1:], "--trials", 1).code == 0

    folder = tmp_path / "tuned"
    names = {"rule.safetensors", "metrics.jsonl", "federation.json", "environment.toml", "settings.json"}
    assert {path.name for path in folder.iterdir()} == names
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    how = {"steps": 3, "lr": 0.003, "adjoint": "exact", "validation": 0.2, "rule": "open@1"}
    assert settings["fine_tuning"].items() >= how.items()
    assert settings["rules"]["open@1"] == describe_rule(fu.pretrained())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = fu.fine_tune(fu.environment("digits-label-skew").replace(rounds=3))
    assert lines == [{"step": m, "validation_loss": loss} for m, loss in enumerate(expected.losses)]
    assert describe_rule(fu.pretrained(folder / "rule.safetensors")) == describe_rule(expected.rule)

    assert fedunfold("repeat", "tuned").out.startswith("same: rule.safetensors, metrics.jsonl, federation.json")
    assert fedunfold("runs", "list", "--in", ".").code == 0
    refused(fedunfold("report", "tuned"), "holds a fine-tuned rule", "read its metrics.jsonl")


def test_a_file_of_ones_own_as_json(fedunfold: Command, tmp_path: Path) -> None:
    save_rule(small_rule(), tmp_path / "mine.safetensors")
    options = ("--iterations", 1, "--outer-lr", 0.01, "--adjoint", "first_order", "--format", "json")
    made = fedunfold(*ENV, "--from", "mine.safetensors", *options)
    assert made.code == 0, made.err
    found = made.json
    assert set(found) == {
        *("environment", "name", "kept", "step", "validation_losses", "runs", "parameters", "folder", "file")
    }
    assert (found["name"], found["kept"], found["step"], found["runs"]) == ("small@1-tuned", True, 1, 3)
    assert found["validation_losses"][1] < found["validation_losses"][0]
    assert describe_rule(fu.pretrained(tmp_path / found["file"]))["parameters"] == found["parameters"]
    settings = json.loads((tmp_path / found["folder"] / "settings.json").read_text(encoding="utf-8"))
    assert [entry["given"] for entry in settings["inputs"]] == ["mine.safetensors"]


def test_a_rule_that_stays_is_the_file_it_was(fedunfold: Command, tmp_path: Path) -> None:
    save_rule(fu.pretrained(), tmp_path / "before.safetensors")
    made = fedunfold(*LINE, "--iterations", 1, "--outer-lr", 0.9, "--out", "same")
    assert made.code == 0, made.err
    assert "open@1 stays as it is: none of 1 steps lowered its validation loss of " in made.out
    assert "to see what it brings" not in made.out
    assert (tmp_path / "same" / "rule.safetensors").read_bytes() == (tmp_path / "before.safetensors").read_bytes()


def test_other_parts_come_with_the_rule(fedunfold: Command, tmp_path: Path) -> None:
    made = fedunfold(*LINE, "--iterations", 1, "--local", "momentum:rho=0.5", "--absent", "drop", "--out", "tuned")
    assert made.code == 0, made.err
    algorithm = fu.pretrained(tmp_path / "tuned" / "rule.safetensors").algorithm
    assert algorithm is not None
    assert (algorithm.local, algorithm.absent) == (fu.momentum(0.5), "drop")


def test_what_was_stopped_is_resumed_to_the_same_bytes(
    fedunfold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fedunfold(*LINE, "--out", "whole").code == 0
    with monkeypatch.context() as patched:
        interrupt_after(2, patched)
        stopped = fedunfold(*LINE, "--out", "cut")
    assert (stopped.code, stopped.err) == (130, "stopped after outer step 2; the same command resumes.\n")
    assert not (tmp_path / "cut" / "rule.safetensors").exists()
    resumed = fedunfold(*LINE, "--out", "cut", "--resume")
    assert resumed.code == 0 and "resuming from outer step 2 of 3" in resumed.err
    for name in ("rule.safetensors", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_it_is_followed_in_tensorboard(fedunfold: Command, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = fedunfold(*LINE, "--iterations", 1, "--out", "tuned", "--track", f"tensorboard:{tmp_path / 'tb'}")
    assert done.code == 0, done.err
    events = EventAccumulator(str(tmp_path / "tb" / "tuned")).Reload()
    assert [event.step for event in events.Scalars("fine-tuning/validation_loss")] == [0, 1]


WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("--method", "duw-fedavg"), "--method is about learning a table"),
    (("--schedule", "fast"), "--schedule is about learning a table"),
    (("--outer", "final"), "--outer is about learning a table"),
    (("--fraction", 0.5), "--fraction is about learning a table"),
    (("--absent-loss", "skip"), "--absent-loss is about learning a table"),
    (("--kl-weight", 0), "--kl-weight is about learning a table"),
    (("--iterations", 0), "at least 1, not 0"),
    (("--outer-lr", 1.5), "between 0 and 1, not 1.5"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[str(options[0]) for options, _ in WRONG])
def test_what_makes_no_sense_is_refused(fedunfold: Command, tmp_path: Path, options: Any, said: str) -> None:
    refused(fedunfold(*LINE, *options), said)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("rule", "said"), [("open@9", "choose among open, private, open@1, private@1"), ("no.safetensors", "no rule file")]
)
def test_what_is_not_there_is_refused(fedunfold: Command, rule: str, said: str) -> None:
    refused(fedunfold(*ENV, "--from", rule), said)
