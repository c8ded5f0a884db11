"""The runs in a folder: listed, compared and deleted. A damaged one is described, and stops nothing."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fedunfold.core.errors import InputError, WriteError
from fedunfold.core.registry import unknown
from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.io.atomic import FolderLock, InUseError, parse_toml
from fedunfold.runs.reader import DamagedRunError, holds_run, list_files, parse_object, read_file, read_settings
from fedunfold.runs.resume import ResumeDir
from fedunfold.runs.schema import ENVIRONMENT, METRICS, REPORT, RESULT, SETTINGS, MetricRecord
from fedunfold.tracking.jsonl import PROGRESS
from fedunfold.tracking.scalars import flattened

LARGEST = sys.float_info.max  # a whole number in a file may be beyond it


@dataclass(frozen=True)
class RunSummary:
    """What a folder says about its run.

    Attributes:
        path: The folder.
        state: Whether the run has ended, can be resumed or is at work, or is damaged.
        settings: settings.json, or what a run without it began with.
        results: A row for each method.
        problem: What is damaged or missing.
        environment: environment.toml.
        files: The run's files that exist, settings.json last.
        made: When settings.json was written, or the newest file of an unfinished run.
        size: Bytes in the files, without the report, which is made later.
    """

    path: Path
    state: Literal["finished", "unfinished", "damaged"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path] = ()
    made: datetime | None = None
    size: int = 0

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def methods(self) -> list[str]:
        """Those in the settings, or where they name none, those with results."""
        named = self.settings.get("methods", self.settings.get("method"))
        if isinstance(named, str | list):
            return [str(name) for name in ([named] if isinstance(named, str) else named)]
        return [str(row["method"]) for row in self.results if "method" in row]

    @property
    def primary(self) -> PrimaryMetric:
        """What models were compared by; a classifier's accuracy where the settings do not say."""
        return _primary(self.settings)

    @property
    def measures(self) -> list[str]:
        """What the rows of the results hold, as it is called there."""
        return [name for name in _measures(self.primary.name) if any(name in row for row in self.results)]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "problem": self.problem or None,
            "command": self.settings.get("command"),
            "environment": self.settings.get("environment"),
            "methods": self.methods,
            "metric": self.primary.describe(),
            "results": list(self.results),
            "made": self.made and self.made.isoformat(timespec="seconds"),
            "size": self.size,
        }


def runs_in(folder: Path) -> list[RunSummary]:
    """All runs below a folder, by name; whatever else is there is ignored."""
    return [summarize(path) for path in _run_folders(folder)]


def find_run(name: str, folder: Path) -> RunSummary:
    """One of the runs in a folder.

    Args:
        name: Its name, or a path into the folder; never one elsewhere.
        folder: The folder that holds the runs.

    Raises:
        InputError: There is no such run.
    """
    path = Path(name) if len(Path(name).parts) > 1 else folder / name
    if path.resolve().parent != folder.resolve() or path.name in ("", ".."):
        raise InputError(f"'{name}' is not in {folder}; give the folder that holds the run as `folder`.")
    if path.is_symlink():
        raise InputError(f"{path} is a link; give the folder that holds what it leads to as `folder`.")
    path = folder / path.name
    if not path.is_dir():
        known = [found.name for found in _run_folders(folder)]
        if not known:
            raise InputError(f"there is no run '{name}': {folder} holds none.")
        raise InputError(unknown("run", path.name, known))
    if not _is_run(path):
        raise InputError(f"{path} is not a run folder: it has neither {SETTINGS} nor {PROGRESS}.")
    return summarize(path)


def summarize(path: Path) -> RunSummary:
    """The run in a folder. This never fails: that a file cannot be read is what there is to say."""
    live, unfinished = path / PROGRESS, ResumeDir(path)
    summary = RunSummary(path, "damaged")
    try:
        files = [*([live] if live.is_file() else ()), *list_files(path)]
        ended = [file for file in files if file.name == SETTINGS and not unfinished.exists]
        times = [file.stat().st_mtime for file in ended or [*files, *unfinished.folder.glob("*")]]
        summary = replace(
            summary,
            files=files,
            made=datetime.fromtimestamp(max(times), UTC) if times else None,
            size=sum(file.stat().st_size for file in files if file.name != REPORT),
        )
        if not holds_run(path):
            began, results = _read_progress(live) if live in files or not unfinished.exists else ({}, [])
            problem = "it was ended half-way, or is at work"
            return replace(summary, state="unfinished", settings=began, results=results, problem=problem)
        settings = read_settings(path)
        summary = replace(summary, settings=settings)
        environment, results = _read_results(path, settings, files)
    except DamagedRunError as error:
        return replace(summary, problem=error.problem)
    except InputError as error:
        return replace(summary, problem=str(error).rstrip("."))
    except OSError as error:
        return replace(summary, problem=f"it cannot be read: {error.strerror}")
    short = _shortfall(settings, results) or ("it can be resumed" if unfinished.exists else "")
    state: Literal["finished", "unfinished"] = "unfinished" if short else "finished"
    return replace(summary, state=state, results=results, problem=short, environment=environment)


def differing(runs: Sequence[RunSummary]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Settings that are not the same in all runs, and every result; a value for each run, None where it has none.

    Args:
        runs: Those to be compared.

    Returns:
        (settings, results) by their names.
    """
    settings = _side_by_side([_all_settings(run) for run in runs])
    results = _side_by_side([_all_results(run) for run in runs])
    return {name: values for name, values in settings.items() if any(v != values[0] for v in values)}, results


@contextmanager
def locked(runs: Sequence[RunSummary]) -> Iterator[None]:
    """Let no other process write to any of these runs; refused where one does.

    Args:
        runs: Those that nobody else is to write to.

    Raises:
        InputError: Another process writes to one of them.
    """
    with ExitStack() as locks:
        for run in runs:
            try:
                locks.enter_context(FolderLock(run.path))
            except InUseError as error:
                raise InputError(f"the run in {run.path} is still being written; wait until it has ended.") from error
        yield


def delete_run(run: RunSummary) -> list[str]:
    """Delete the files that the run recorded, and its folder where nothing else is in it.

    Returns:
        The names of what stays.

    Raises:
        WriteError: A file cannot be deleted.
    """
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
        raise WriteError(
            f"cannot delete the run in {run.path}: {error.strerror or error}; delete it by hand."
        ) from error
    return left


def _run_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and _is_run(path))
    except FileNotFoundError as error:
        raise InputError(f"there is no folder {folder}; give the one that holds the runs as `folder`.") from error
    except OSError as error:
        raise InputError(f"cannot read the folder {folder}: {error.strerror}.") from error


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (SETTINGS, PROGRESS)) or ResumeDir(path).exists


def _read_results(
    path: Path, settings: Mapping[str, Any], files: Sequence[Path]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """environment.toml, and a row for each method: a comparison's own, with its trials, or the last of the metrics."""
    listed = settings.get("files")
    if not isinstance(settings.get("command"), str) or not isinstance(listed, list):
        raise DamagedRunError(path / SETTINGS, "cannot be read as that of a run")
    if missing := [path / str(name) for name in listed if path / str(name) not in files]:
        raise DamagedRunError(missing[0], "is missing")
    environment = _read_toml(path / ENVIRONMENT) if ENVIRONMENT in listed else {}
    metrics, result, primary = path / METRICS, path / RESULT, _primary(settings).name
    texts = read_file(metrics).splitlines() if METRICS in listed else []
    lines = [parse_object(text, metrics, number) for number, text in enumerate(texts, 1)]
    if RESULT not in listed:
        if METRICS in listed and not lines:
            raise DamagedRunError(metrics, "is empty")
        return environment, [_row(line, primary) for line in lines[-1:]]
    rows = parse_object(read_file(result), result).get("methods")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DamagedRunError(result, "has no rows for methods")
    trials = Counter(method for method, _ in {(str(line.get("method")), str(line.get("trial"))) for line in lines})
    return environment, [{**_row(row, primary), "trials": trials[str(row.get("method"))]} for row in rows]


def _read_toml(file: Path) -> dict[str, Any]:
    text = read_file(file)
    try:
        return parse_toml(text)
    except InputError as error:
        raise DamagedRunError(file, str(error)) from error


def _read_progress(file: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Settings and the last line of every method in a live file; lines that were cut do not count."""
    settings: Mapping[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for line in read_file(file).splitlines():
        with suppress(DamagedRunError):
            record = parse_object(line, file)
            if isinstance(record.get("began"), dict):
                settings, rows = record["began"], {}
            elif isinstance(record.get("method"), str):
                rows[record["method"]] = _row(record, _primary(settings).name)
    if not settings:
        raise DamagedRunError(file, "does not name what began")
    return settings, list(rows.values())


def _primary(settings: Mapping[str, Any]) -> PrimaryMetric:
    """What settings name as the metric, whatever else is in them."""
    with suppress(ValidationError):
        return MetricRecord.model_validate(settings.get("metric")).primary
    return ACCURACY


def _measures(metric: str) -> tuple[str, ...]:
    """What a row of results may hold."""
    return f"{metric}_mean", f"{metric}_sd", metric, "loss", "outer_loss"


def _row(record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Name and finite numbers of a record."""
    counts = {name: record[name] for name in ("iteration", "round") if isinstance(record.get(name), int)}
    numbers = {name: record[name] for name in _measures(metric) if isinstance(record.get(name), int | float)}
    method = {"method": str(record["method"])} if "method" in record else {}
    return {**method, **counts, **{name: value for name, value in numbers.items() if abs(value) <= LARGEST}}


def _shortfall(settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """What was to be computed and is not there: Ctrl-C and failures save what was finished."""
    learning, methods = settings.get("learning"), settings.get("methods")
    if settings["command"] == "learn" and results and isinstance(learning, dict):
        done, requested = results[0].get("iteration", 0) + 1, learning.get("iterations")
        return f"{done} of {requested} outer iterations" if done != requested else ""
    if isinstance(methods, list) and len(results) < len(methods):
        return f"{len(results)} of {len(methods)} methods"
    requested = settings.get("trials")
    short = [row for row in results if isinstance(requested, int) and row.get("trials", requested) < requested]
    if short:
        return f"{short[0]['trials']} of {requested} trials of {short[0].get('method')}"
    return ""


def _all_settings(run: RunSummary) -> dict[str, Any]:
    own = {name: value for name, value in run.settings.items() if name != "files"}
    federation = {name: value for name, value in run.environment.items() if name != "name"}
    clients = federation.get("clients")
    if isinstance(clients, list) and all(isinstance(client, dict) and "key" in client for client in clients):
        federation["clients"] = {client["key"]: client for client in clients}  # one by one, not as one long line
    return flattened({**own, **({ENVIRONMENT: federation} if federation else {})})


def _all_results(run: RunSummary) -> dict[str, Any]:
    """By method and measure; the mean over trials stands beside the score of a single run."""
    return {
        f"{row.get('method', 'learned')}: {name.removesuffix('_mean').replace('_', ' ')}": row[name]
        for row in run.results
        for name in run.measures
        if name in row
    }


def _side_by_side(maps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in maps for name in each)
    return {name: [each.get(name) for each in maps] for name in names}
