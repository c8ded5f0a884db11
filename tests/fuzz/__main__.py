"""The runner; see the package's docstring."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.formats import NAMES
from tests.fuzz.working import CORPUS, work

PATIENCE = 3600.0
"""Seconds for all cases of a format, in case one hangs where no signal reaches it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="over all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NAMES, action="append", help="this format; may be repeated")
    parser.add_argument("--engine", choices=("mutation", "atheris"), default="mutation")
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir(), "fedunfold-fuzz-failures"))
    parser.add_argument("--write-corpus", action="store_true", help="make the valid files anew, and leave")
    parser.add_argument("--worker", type=Path, metavar="REPORT", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = list(asked.only or NAMES)
    cases = -(-asked.cases // len(names))
    if asked.write_corpus:
        return write_corpus()
    if asked.worker is not None:
        work(names, asked.seed, cases, asked.worker, asked.failures)
        return 0
    if asked.engine == "atheris":
        rows = {name: guided(name, cases, asked.seed) for name in names}
    else:
        rows = mutated(names, cases, asked.seed, asked.failures)
    table = Table(title=f"{cases} cases of each format, seed {asked.seed}, by {asked.engine}")
    for column in ("format", "cases", "understood", "refused", "failed"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, row in rows.items():
        table.add_row(name, *map(str, row))
    Console(width=100).print(table)
    wrong = sum(row[-1] for row in rows.values())
    print(
        f"{sum(row[0] for row in rows.values())} cases, {wrong} failed" + (f"; see {asked.failures}" if wrong else "")
    )
    return 1 if wrong else 0


def mutated(names: list[str], cases: int, seed: int, failures: Path) -> dict[str, tuple[int, ...]]:
    """(cases, understood, refused, failed) of each format; a process that dies has failed in the case it was at."""
    rows: dict[str, tuple[int, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left := [name for name in names if name not in rows]:
            command = [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--cases", str(cases * len(left))]
            command += [part for name in left for part in ("--only", name)]
            command += ["--failures", str(failures), "--worker", folder]
            try:
                ended = f"ended with {subprocess.run(command, timeout=PATIENCE, check=False).returncode}"
            except subprocess.TimeoutExpired:
                ended = "did not end"
            for name in left:
                if (report := Path(folder, name)).exists():
                    found = json.loads(report.read_text())
                    refused = found["cases"] - found["understood"] - found["failed"]
                    rows[name] = (found["cases"], found["understood"], refused, found["failed"])
            if ended != "ended with 0":
                at = Path(folder, "at").read_text() if Path(folder, "at").exists() else left[0]
                print(f"the process {ended} in case {at}", flush=True)
                rows[re.split(r"\W", at)[0]] = (cases, 0, 0, 1)
    return rows


def guided(name: str, cases: int, seed: int) -> tuple[int, ...]:
    """The same by coverage; atheris stops at the first failure, and does not count what was understood."""
    with tempfile.TemporaryDirectory() as found:
        command = [sys.executable, "-m", "tests.fuzz.guided", name, f"-runs={cases}", f"-seed={seed + 1}"]
        ended = subprocess.run([*command, found, str(CORPUS / name)], check=False)
    return cases, 0, 0, int(ended.returncode != 0)


def write_corpus() -> int:
    from tests.fuzz.formats import format_of

    for name in NAMES:
        for seed, data in format_of(name).seeds().items():
            file = CORPUS / name / seed
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    return 0


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
