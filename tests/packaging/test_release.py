"""What a release is made of: the wheel by itself, with and without a compiler, the source distribution, and one line
where an extra is missing."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from fedunfold.engines.simulation.backends.cpu import bindings, is_built
from fedunfold.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedunfold"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs", "supply"}
CAN_COMPILE = shutil.which("g++") is not None and platform.machine() == "x86_64"
EXTENSION = f"{bindings.EXTENSION.replace('.', '/')}.abi3.so"
BACKENDS = "src/fedunfold/engines/simulation/backends"
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so")
MADE_HERE = {"build", "dist", "runs", "site"}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def not_source(folder: str, names: list[str]) -> set[str]:
    return NOT_SOURCE(folder, names) | (MADE_HERE if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it, without a package index."""
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "source", ignore=not_source)
    out = folder / "dist"
    ended = python("-m", "build", "--no-isolation", "--outdir", str(out), str(folder / "source"))
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """For every Python from 3.11 on, and where the extension can be built for this platform alone."""
    (found,) = built.glob(f"fedunfold-{VERSION}-*-*-*.whl")
    return found


@pytest.fixture(scope="module")
def pure_wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip builds from the source distribution where there is no compiler."""
    out, source = tmp_path_factory.mktemp("pure"), built / f"fedunfold-{VERSION}.tar.gz"
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(out))
    ended = python("-m", "pip", "wheel", *options, str(source), CC="/bin/false", CXX="/bin/false")
    assert ended.returncode == 0, ended.stderr
    (found,) = out.iterdir()
    return found


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files_of_the_package() -> set[str]:
    """All but the extension."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PACKAGE.parent).as_posix() for path in files if path.suffix != ".so"}


@pytest.mark.slow
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    held = files_of(wheel)
    assert held == files_of_the_package() | ({EXTENSION} if CAN_COMPILE else set())
    assert {Path(name).suffix for name in held} >= {".py", ".toml", ".cu", ".cuh", ".typed"}
    if CAN_COMPILE:
        assert wheel.name.endswith("-cp311-abi3-linux_x86_64.whl")


@pytest.mark.slow
@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_for_every_platform(pure_wheel: Path) -> None:
    assert files_of(pure_wheel) == files_of_the_package()
    assert pure_wheel.name == f"fedunfold-{VERSION}-py3-none-any.whl"


@pytest.mark.slow
@pytest.mark.slow
def test_without_a_compiler_torch_trains_to_the_same_accuracy(wheel: Path, pure_wheel: Path, tmp_path: Path) -> None:
    found = []
    for number, built in enumerate((wheel, pure_wheel)):
        target = str(tmp_path / str(number))
        installed = python("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, str(built))
        assert installed.returncode == 0, installed.stderr
        compiled = python(
            "-c",
            "from fedunfold.engines.simulation.backends import cpu; print(cpu.__file__, cpu.is_built())",
            PYTHONPATH=target,
        )
        file, can_call = compiled.stdout.split()
        assert file.startswith(target)
        assert can_call == str(built == wheel and is_built() and CAN_COMPILE)
        options = ("--rounds", "3", "--dtype", "float64", "--format", "json", "--out", f"{target}-run")
        ended = python("-m", "fedunfold", "run", "digits-label-skew", *options, PYTHONPATH=target)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    by_extension, by_torch = found
    assert by_torch["accuracy"] == by_extension["accuracy"] > 50
    assert by_torch["rounds"] == by_extension["rounds"]
    assert by_torch["losses"] == pytest.approx(by_extension["losses"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.slow
def test_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (entry,) = tmp_path.glob("*.dist-info/entry_points.txt")
    assert "fedunfold = fedunfold.cli:main" in entry.read_text(encoding="utf-8")
    found = python("-c", "import fedunfold; print(fedunfold.__file__)", PYTHONPATH=str(tmp_path))
    assert found.stdout.strip() == str(tmp_path / "fedunfold" / "__init__.py")
    version = python("-m", "fedunfold", "--version", PYTHONPATH=str(tmp_path))
    assert version.stdout == f"fedunfold {VERSION}\n"
    compiled = python(
        "-c",
        "from fedunfold.engines.simulation.backends.cpu import is_built; print(is_built())",
        PYTHONPATH=str(tmp_path),
    )
    assert compiled.stdout.strip() == str(is_built() and CAN_COMPILE), compiled.stderr
    listed = python("-m", "fedunfold", "env", "show", "digits-flaky", PYTHONPATH=str(tmp_path))
    assert tomllib.loads(listed.stdout)["name"] == "digits-flaky"


@pytest.mark.slow
@pytest.mark.slow
def test_the_source_distribution_has_tests_and_documentation(built: Path) -> None:
    with tarfile.open(built / f"fedunfold-{VERSION}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "CITATION.cff",
        "docs/index.md",
        "tests/cli/conftest.py",
    } <= held
    assert {"examples/quickstart.ipynb", "tests/support/emulated_gpu.h", "docs/results/mnist/results.json"} <= held
    headers = [*(ROOT / BACKENDS / "cpu").glob("*.hpp"), *(ROOT / BACKENDS / "cuda").glob("*.cuh")]
    assert {header.relative_to(ROOT).as_posix() for header in headers} <= held
    assert not any("__pycache__" in name or name.endswith(".so") for name in held)


def test_the_version_is_semantic_and_everywhere_the_same() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", VERSION)
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_extra_has_an_install_line(extra: str) -> None:
    assert any(
        f"pip install 'fedunfold[{extra}]'" in path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")
    )


# For each extra, a package of it and what a user does that needs it.
MISSING = {
    "vision": ("transformers", "main(['data', 'features', 'images', '--model', 'any', '--out', 'features.npz'])"),
    "flower": ("flwr", "import fedunfold.engines.flower"),
    "tables": ("pandas", "main(['env', 'new', 'sites', '--yes'])"),
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_extra_is_one_line(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process where the extra's package cannot be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "one.png").write_bytes(b"")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.csv").write_text("v,y\n1,a\n2,b\n")
    package, statement = MISSING[extra]
    script = f"""
import sys
sys.modules[{package!r}] = None
from fedunfold.cli import main
from fedunfold.core.errors import InputError
try:
    {statement}
except InputError as error:
    sys.exit(f"error: {{error}}")
"""
    ended = python("-c", script)
    assert ended.returncode != 0
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: ") and f"pip install 'fedunfold[{extra}]'" in ended.stderr
