"""The runs in a folder: found, read, set side by side and deleted. What is damaged is told of, and stops nothing."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedunfold.core.errors import InputError
from fedunfold.core.registry import unknown
from fedunfold.io.atomic import FolderLock, InUseError, parse_toml, read_text
from fedunfold.io.limits import LINES_BYTES, RECORD_BYTES
from fedunfold.runs.folder import REPORT, SETTINGS, recorded, recorded_files
from fedunfold.runs.resume import ResumeDir
from fedunfold.tracking.jsonl import PROGRESS
from fedunfold.tracking.scalars import flattened

State = Literal["finished", "unfinished", "damaged"]
MEASURES = ("accuracy_mean", "accuracy_sd", "accuracy", "loss", "outer_loss")


@dataclass(frozen=True)
class RunSummary:
    """What a folder says of its run. `results` has a row for each method; `problem` says what is damaged or missing.

    `made` is when settings.json was written, or what is newest of an unfinished run; `size` the bytes in `files`,
    without the report, which is made later.
    """

    path: Path
    state: State
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()
    made: datetime | None = None
    size: int = 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def methods(self) -> list[str]:
        """Those asked for, or where the settings name none, those with results."""
        named = self.settings.get("methods", self.settings.get("method"))
        if isinstance(named, str | list):
            return [str(name) for name in ([named] if isinstance(named, str) else named)]
        return [str(row["method"]) for row in self.results if "method" in row]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "problem": self.problem or None,
            "command": self.settings.get("command"),
            "environment": self.settings.get("environment"),
            "methods": self.methods,
            "results": list(self.results),
            "made": self.made and self.made.isoformat(timespec="seconds"),
            "size": self.size,
        }


class _DamagedError(Exception):
    """What is wrong with a run's file."""


def runs_in(folder: Path) -> list[RunSummary]:
    """All runs below a folder, by name; whatever else is there is passed over."""
    return [read_run(path) for path in _run_folders(folder)]


def find_run(name: str, folder: Path) -> RunSummary:
    """The run of a name, or of a path into the folder; never one elsewhere."""
    path = Path(name) if len(Path(name).parts) > 1 else folder / name
    if path.resolve().parent != folder.resolve() or path.name in ("", ".."):
        raise InputError(f"'{name}' is not in {folder}; say with --in which folder holds the run.")
    if path.is_symlink():
        raise InputError(f"{path} is a link; give the folder that it leads to, with --in.")
    path = folder / path.name
    if not path.is_dir():
        known = [found.name for found in _run_folders(folder)]
        if not known:
            raise InputError(f"there is no run '{name}': {folder} holds none.")
        raise InputError(f"{unknown('run', path.name, known)}")
    if not _is_run(path):
        raise InputError(f"{path} is not a run folder: it has neither {SETTINGS} nor {PROGRESS}.")
    return read_run(path)


def read_run(path: Path) -> RunSummary:
    """The run in a folder; reading never fails, because that a file cannot be read is what there is to say."""
    files: list[Path] = []
    try:
        live = path / PROGRESS
        files = [*([live] if live.is_file() else ()), *recorded_files(path)]
        unfinished = ResumeDir(path)
        ended = [file for file in files if file.name == SETTINGS and not unfinished.exists]
        dated = ended or [*files, *unfinished.folder.glob("*")]
        run = replace(
            _read(path, files),
            files=files,
            made=datetime.fromtimestamp(max(file.stat().st_mtime for file in dated), UTC),
            size=sum(file.stat().st_size for file in files if file.name != REPORT),
        )
        json.dumps(run.settings, allow_nan=False)
    except OSError as error:
        return RunSummary(path, "damaged", problem=f"it cannot be read: {error.strerror}", files=files)
    except ValueError:
        return RunSummary(path, "damaged", problem=f"{SETTINGS} has numbers that are none", files=files)
    return run


def _read(path: Path, files: Sequence[Path]) -> RunSummary:
    settings = recorded(path)
    try:
        if settings is None:
            live = path / PROGRESS
            began, results = _progress(live) if live.is_file() or not ResumeDir(path).exists else ({}, [])
            return RunSummary(path, "unfinished", began, results, "it was ended half-way, or is at work")
        listed = settings.get("files")
        if not isinstance(settings.get("command"), str) or not isinstance(listed, list):
            raise _DamagedError(f"{SETTINGS} cannot be read as that of a run")
        if missing := [str(name) for name in listed if path / str(name) not in files]:
            raise _DamagedError(f"{missing[0]} is missing")
        environment = _toml(path / "environment.toml") if "environment.toml" in listed else {}
        results = _results(path, listed)
    except _DamagedError as error:
        return RunSummary(path, "damaged", settings or {}, problem=str(error))
    short = _shortfall(settings, results) or ("the same command goes on" if ResumeDir(path).exists else "")
    return RunSummary(path, "unfinished" if short else "finished", settings, results, short, environment)


def differing(runs: Sequence[RunSummary]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Settings that are not the same in all runs, and every result; a value for each run, None where it has none."""
    settings = _side_by_side([_all_settings(run) for run in runs])
    results = _side_by_side([_all_results(run) for run in runs])
    return {name: values for name, values in settings.items() if any(v != values[0] for v in values)}, results


@contextmanager
def locked(runs: Sequence[RunSummary]) -> Iterator[None]:
    """Nobody else writes to any of these runs; refused where somebody does."""
    with ExitStack() as locks:
        for run in runs:
            try:
                locks.enter_context(FolderLock(run.path))
            except InUseError as error:
                raise InputError(f"the run in {run.path} is still being written; wait until it has ended.") from error
        yield


def delete_run(run: RunSummary) -> list[str]:
    """Delete the files that the run recorded, and its folder where nothing else is in it; returns what stays."""
    try:
        for file in run.files:  # settings.json comes last: what is deleted only in part is still a run
            file.unlink(missing_ok=True)
        unfinished = ResumeDir(run.path)
        if unfinished.exists and not unfinished.folder.is_symlink():  # never what lies elsewhere
            unfinished.discard()
        left = sorted(entry.name for entry in run.path.iterdir())
        if not left:
            run.path.rmdir()
    except OSError as error:
        raise InputError(f"cannot delete the run in {run.path}: {error.strerror or error}.") from error
    return left


def _run_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and _is_run(path))
    except FileNotFoundError as error:
        raise InputError(f"there is no folder {folder}; say with --in where the runs are.") from error
    except OSError as error:
        raise InputError(f"cannot read the folder {folder}: {error.strerror}.") from error


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (SETTINGS, PROGRESS)) or ResumeDir(path).exists


def _text(file: Path) -> str:
    try:
        return read_text(file, LINES_BYTES if file.suffix == ".jsonl" else RECORD_BYTES)
    except InputError as error:  # too large, or no text
        raise _DamagedError(str(error).rstrip(".")) from error
    except OSError as error:
        raise _DamagedError(f"{file.name} cannot be read") from error


def _toml(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(_text(file))
    except InputError as error:
        raise _DamagedError(f"{file.name} is no TOML") from error


def _json(text: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"{file.name} is no JSON") from error
    if not isinstance(content, dict):
        raise _DamagedError(f"{file.name} holds no JSON objects")
    return content


def _results(path: Path, listed: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each method: a comparison's own, with its trials, or what the last line of the metrics says."""
    metrics = path / "metrics.jsonl"
    lines = [_json(line, metrics) for line in _text(metrics).splitlines()] if metrics.name in listed else []
    file = path / "result.json"
    if file.name in listed:
        rows = _json(_text(file), file).get("methods")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise _DamagedError(f"{file.name} has no rows for methods")
        trials = Counter(method for method, _ in {(str(line.get("method")), str(line.get("trial"))) for line in lines})
        return [{**_row(row), "trials": trials[str(row.get("method"))]} for row in rows]
    if not lines and metrics.name in listed:
        raise _DamagedError(f"{metrics.name} is empty")
    return [_row(lines[-1])] if lines else []


def _progress(file: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Settings and the last line of every method in a live file; lines that were cut do not count."""
    settings: Mapping[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for line in _text(file).splitlines():
        try:
            record = _json(line, file)
        except _DamagedError:
            continue
        if isinstance(record.get("began"), dict):
            settings, rows = record["began"], {}
        elif isinstance(record.get("method"), str):
            rows[record["method"]] = _row(record)
    if not settings:
        raise _DamagedError(f"{file.name} does not say what began")
    return settings, list(rows.values())


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Name and finite numbers of a record."""
    counts = {name: record[name] for name in ("iteration", "round") if isinstance(record.get(name), int)}
    numbers = {name: record[name] for name in MEASURES if isinstance(record.get(name), int | float)}
    method = {"method": str(record["method"])} if "method" in record else {}
    return {**method, **counts, **{name: value for name, value in numbers.items() if _is_finite(value)}}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False


def _shortfall(settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """What was asked for and is not there: Ctrl-C and failures keep what was finished."""
    learning, methods = settings.get("learning"), settings.get("methods")
    if settings["command"] == "learn" and results and isinstance(learning, dict):
        done, asked = results[0].get("iteration", 0) + 1, learning.get("iterations")
        return f"{done} of {asked} outer iterations" if done != asked else ""
    if isinstance(methods, list) and len(results) < len(methods):
        return f"{len(results)} of {len(methods)} methods"
    asked = settings.get("trials")
    short = [row for row in results if isinstance(asked, int) and row.get("trials", asked) < asked]
    if short:
        return f"{short[0]['trials']} of {asked} trials of {short[0].get('method')}"
    return ""


def _all_settings(run: RunSummary) -> dict[str, Any]:
    own = {name: value for name, value in run.settings.items() if name != "files"}
    federation = {name: value for name, value in run.environment.items() if name != "name"}
    clients = federation.get("clients")
    if isinstance(clients, list) and all(isinstance(client, dict) and "key" in client for client in clients):
        federation["clients"] = {client["key"]: client for client in clients}  # one by one, not as one long line
    return flattened({**own, **({"environment.toml": federation} if federation else {})})


def _all_results(run: RunSummary) -> dict[str, Any]:
    """By method and measure; the mean over trials stands beside the accuracy of a single run."""
    return {
        f"{row.get('method', 'learned')}: {name.removesuffix('_mean').replace('_', ' ')}": row[name]
        for row in run.results
        for name in MEASURES
        if name in row
    }


def _side_by_side(maps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in maps for name in each)
    return {name: [each.get(name) for each in maps] for name in names}
