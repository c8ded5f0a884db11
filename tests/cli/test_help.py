"""`--help`: quick, readable, and with the choices that the library has."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import typer

from fedunfold.cli import options as opt
from fedunfold.cli.app import app
from fedunfold.cli.data import features
from fedunfold.cli.reproduce import reproduce
from fedunfold.core import algorithm, messages
from fedunfold.data.vision.files import StoredType
from fedunfold.studies.cases import Setting, Study
from fedunfold.unfolding import Learning
from tests.cli.conftest import Command


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


PARTS = get_type_hints(opt.Parts)
COMMANDS = list(commands(typer.main.get_command(app)))


def test_all_commands_are_looked_at() -> None:
    assert {("learn",), ("theory",), ("env", "check"), ("data", "features")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_escapes_are_shown(fedunfold: Command, path: tuple[str, ...]) -> None:
    shown = fedunfold(*path, "--help")
    assert shown.code == 0
    assert "\\[" not in shown.out
    if path and path not in (("env",), ("data",), ("runs",), ("site",)):
        assert f"Example: fedunfold {' '.join(path)}" in shown.out


def test_help_waits_for_nothing_that_only_a_command_needs() -> None:
    """Of the library no more than its errors and its version, and none of what the rest of it is made with."""
    listed = "import sys, fedunfold.cli.app; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", listed], check=True, capture_output=True, text=True).stdout.split()
    )
    ours = {name for name in loaded if name.startswith("fedunfold.") and not name.startswith("fedunfold.cli")}
    assert ours == {"fedunfold.core", "fedunfold.core.errors", "fedunfold.version"}
    assert not loaded & {"torch", "numpy", "matplotlib", "pydantic", "fedunfold.cli.import_source"}


def choices(annotation: Any) -> tuple[str, ...]:
    """The words of the Literal somewhere in a type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for part in get_args(annotation) if (found := choices(part))), ())


@pytest.mark.parametrize(
    ("option", "original"),
    [
        (PARTS["absent"], get_args(algorithm.Absent)),
        (PARTS["filter"], get_args(algorithm.UpdateFilter)),
        (opt.AbsentLoss, get_args(messages.AbsentLoss)),
        (opt.Schedule, get_args(get_type_hints(Setting)["schedule"])),
        (get_type_hints(features)["dtype"], get_args(StoredType)),
        (get_type_hints(reproduce)["study"], (*get_args(Study), "all")),
    ],
)
def test_choices_are_those_of_the_library(option: Any, original: tuple[str, ...]) -> None:
    assert choices(option) == original


def test_learning_has_an_option_for_every_setting() -> None:
    options, settings = get_type_hints(opt.LearningOptions), get_type_hints(Learning)
    assert set(options) - {"schedule"} == set(settings)
    for name, setting in settings.items():
        assert choices(options[name]) == choices(setting), name


def test_precisions_are_torch_types() -> None:
    assert [getattr(torch, name) for name in choices(opt.Precision)] == [torch.float32, torch.float64]


def test_every_option_says_what_it_is_for() -> None:
    for path in COMMANDS:
        command: Any = typer.main.get_command(app)
        for name in path:
            command = command.commands[name]
        silent = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
        assert not silent, f"{' '.join(path)}: {silent}"
