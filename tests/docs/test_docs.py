"""What README and docs show works as it stands there.

Every page gets a folder of its own, in which its Python blocks run in order, in one namespace, and its command lines
run in order. All with small settings: one trial, and two outer iterations where a command does not say how many.
Commands that take long even so, or need what a test has not, are only read by the command line's own parser; they are
listed below with the reason.
"""

import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import fedunfold as fu
from fedunfold.cli import main
from fedunfold.cli.app import app
from fedunfold.core.parts import AGGREGATORS, CLIENT_SAMPLERS, LOCAL_OPTIMIZERS, OUTER_LOSSES, SERVER_OPTIMIZERS
from fedunfold.core.registry import Registry
from fedunfold.core.task import TASKS
from fedunfold.rules import RULES

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in ROOT.glob("docs/**/*.md") if "results" not in path.parts),
    *sorted(ROOT.glob("*/*/README.md")),
]
ONLY_READ = {
    "data features": "needs a folder of images and a backbone",
    "reproduce": "takes minutes to hours",
    "benchmark": "takes minutes to hours",
    "pretrain": "takes hours",
    "learn digits-label-skew --device cuda": "needs a GPU",
    "compare mnist-2": "needs MNIST and a GPU",
}
OWN_TEST = {
    "docs/custom-data.md": "tests/docs/test_custom_data_page.py, beside the files it needs",
    "docs/consortium.md": "tests/consortium/test_page.py, with a SuperLink and five hospitals",
}
MINE = ("fedunfold env show digits-flaky > mine.toml", "fedunfold learn mine.toml --out runs/mine")
GIVEN = {"docs/resuming.md": MINE, "docs/robustness.md": MINE}
"""What a page takes for granted."""
NEEDS = {"docs/flower.md": "flwr", "docs/secure.md": "flwr", "README.md": "flwr"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
COMMAND = re.compile(r"^\s*(fedunfold .*?)(?:\s+#.*)?$", re.MULTILINE)
ROOT_COMMAND: Any = typer.main.get_command(app)
REGISTRIES: list[Registry[Any]] = [
    RULES,
    SERVER_OPTIMIZERS,
    LOCAL_OPTIMIZERS,
    AGGREGATORS,
    OUTER_LOSSES,
    CLIENT_SAMPLERS,
    TASKS,
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in FENCE.findall(text_of(page)) if language == "python"]


def command_lines(page: Path) -> list[str]:
    """Command lines in indented blocks, and in fenced ones of a shell."""
    text = text_of(page)
    shells = [code for language, code in FENCE.findall(text) if language in ("bash", "sh", "shell", "console")]
    blocks = [*INDENTED.findall(FENCE.sub("", text)), *shells]
    return [line for block in blocks for line in COMMAND.findall(block.replace("\\\n", " "))]


def only_read(line: str) -> bool:
    return line.removeprefix("fedunfold ").startswith(tuple(ONLY_READ))


def small(arguments: list[str]) -> list[str]:
    """The same command, quickly done."""
    quick = ["--iterations", "2"] if arguments[0] in ("learn", "compare") and "--iterations" not in arguments else []
    after = {i + 1 for i, argument in enumerate(arguments) if argument == "--trials"}
    return ["1" if i in after else argument for i, argument in enumerate(arguments)] + quick


def parsed(arguments: list[str]) -> None:
    """Let the command line read its arguments, down to the command, without running it."""
    command, rest, context = ROOT_COMMAND, arguments, None
    while True:
        context = command.make_context(command.name, list(rest), parent=context)
        if not hasattr(command, "commands"):
            return
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def parts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is forgotten after it."""
    for registry in REGISTRIES:
        registry.names()  # so that the package's own are there
        monkeypatch.setattr(registry, "_own", dict(registry._own))


def test_the_page_about_parts_names_every_kind_of_them() -> None:
    text = text_of(ROOT / "docs" / "extending.md")
    for registry in REGISTRIES:
        assert text.count(f"`{registry.group}`") == 1
        assert f'[project.entry-points."{registry.group}"]' in text


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=name_of)
def test_python_examples(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = NEEDS.get(name_of(page))
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    namespace: dict[str, object] = {"__name__": "page"}
    for block in python_blocks(page):
        exec(compile(re.sub(r"trials=\d+", "trials=1", block), name_of(page), "exec"), namespace)  # noqa: S102  (our own page)
    if page == ROOT / "README.md":
        assert Path("weights.safetensors").is_file()
        assert re.search(r"open@1 +1 +\d+\.\d", capsys.readouterr().out)
    if page.name == "tutorial.md":
        assert {path.name for path in Path().iterdir()} >= {"weights.safetensors", "weights.png"}
        assert re.search(r"learned +\d+\.\d ± \d+\.\d %", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if command_lines(p) and name_of(p) not in OWN_TEST], ids=name_of)
def test_command_lines(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (*GIVEN.get(name_of(page), ()), *command_lines(page)):
        typed, _, target = line.partition(" > ")
        arguments = shlex.split(typed)[1:]
        if only_read(line):
            parsed(arguments)
            continue
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(small(arguments))
        assert stop.value.code in (0, None), f"{line}: {capsys.readouterr().err}"
        if target:
            Path(target).write_text(capsys.readouterr().out, encoding="utf-8")


def test_every_exception_is_needed() -> None:
    lines = [line.removeprefix("fedunfold ") for page in PAGES for line in command_lines(page)]
    assert len(lines) >= 20
    for beginning in ONLY_READ:
        assert any(line.startswith(beginning) for line in lines), beginning


def commands_below(command: Any) -> Iterator[Any]:
    for inner in command.commands.values():
        if hasattr(inner, "commands"):
            yield from commands_below(inner)
        else:
            yield inner


@pytest.mark.parametrize("command", list(commands_below(ROOT_COMMAND)), ids=lambda command: str(command.name))
def test_examples_of_the_help_are_understood(command: Any) -> None:
    assert command.epilog is not None
    parsed(shlex.split(command.epilog.removeprefix("Example: fedunfold ").partition(" > ")[0]))


def test_a_wrong_option_is_not_understood() -> None:
    for wrong in ("learn mine.toml --iteration 3", "compare mine.toml --trials many", "env shows x", "learn"):
        with pytest.raises((typer.BadParameter.__mro__[1], SystemExit)):  # UsageError, of click or of typer's own
            parsed(shlex.split(wrong))


def test_commands_within_sentences_exist() -> None:
    for page in PAGES:
        for words in re.findall(r"`fedunfold ([a-z]+(?: [a-z]+)?)", re.sub(r"\s+", " ", text_of(page))):
            first, _, second = words.partition(" ")
            command = ROOT_COMMAND.commands.get(first)
            assert command is not None, f"{name_of(page)}: fedunfold {first}"
            if second and hasattr(command, "commands"):
                assert second in command.commands, f"{name_of(page)}: fedunfold {words}"


def test_what_is_named_beside_the_commands_exists() -> None:
    """Targets of make, extras of the package, programs and notebooks of the examples."""
    targets = re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for page in PAGES:
        text = text_of(page)
        assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets), name_of(page)
        named = {extra for group in re.findall(r"fedunfold\[([a-z,]+)\]", text) for extra in group.split(",")}
        assert named <= set(extras), name_of(page)
        for path in re.findall(r"\bexamples/[\w/]+\.(?:py|ipynb)\b", text):
            assert (ROOT / path).is_file(), f"{name_of(page)}: {path}"


def test_the_reference_has_every_public_name() -> None:
    """By the object, because a part's class has another name than its constructor."""
    text = text_of(ROOT / "docs" / "reference" / "python.md")
    paths = [path for path in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE) if ".flower." not in path]
    shown = [pkgutil.resolve_name(path) for path in paths]
    for name in set(fu.__all__) - {"__version__", "plot"}:
        assert any(getattr(fu, name) is found for found in shown), name


def test_numbers_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    from numbers_of_runs import filled

    for page in (text_of(ROOT / "docs" / "when.md"), text_of(ROOT / "README.md")):
        assert "| dogs-b |" in page
        assert filled(page) == page
        assert filled(page.replace("| mnist-2 |", "| mnist-9 |")) == page
    page = text_of(ROOT / "docs" / "what-unfolding-learned.md")
    assert filled(page) == page


def test_the_readme_is_at_most_two_screens() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 90


def test_pages_have_the_words_of_the_field() -> None:
    """Generated pages have the words of their generators."""
    own = re.compile(r"\bwalk|\blanes?\b|\bset aside\b|\bway back\b|\bgo(?:es|ing)? on\b|\bmend\b|\bput together\b")
    generated = {"benchmarks.md", "gpu-times.md", "schedules.md", "licences.md"}
    for page in PAGES:
        found = [] if page.name in generated else own.findall(text_of(page))
        assert not found, f"{name_of(page)}: {found}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("docs/results/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page)):
            assert (page.parent / target).exists(), f"{name_of(page)}: {target}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], env=quiet, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    pages = {path: text_of(path) for path in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 20
    for path, html in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="?(https?:[^" >]*)', html)
        loaded += re.findall(r'<link[^>]+rel="?(?:stylesheet|preconnect|icon)[^>]+href="?(https?:[^" >]*)', html)
        assert not loaded, f"{path.name}: {loaded}"
