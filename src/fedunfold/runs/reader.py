"""A run's folder, read with care: it may be old, damaged, or somebody else's. Nothing in it is executed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Natural, explain
from fedunfold.report.text import distinct, plain
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.federation_snapshot import FEDERATION, FederationRecord, Record
from fedunfold.runs.folder import CLIENT_ACCURACY, LEARNED, METRICS, MODEL, SETTINGS, file_name
from fedunfold.runs.resume import ResumeDir
from fedunfold.tracking.jsonl import PROGRESS
from fedunfold.version import VERSION

MEBIBYTE = 2**20
LIMITS = {SETTINGS: 16, FEDERATION: 64, METRICS: 512, CLIENT_ACCURACY: 64}  # MiB
WEIGHTS_LIMIT = 512

Floats = NDArray[np.float64]
Parsed = TypeVar("Parsed", bound=Record)


class SettingsRecord(Record):
    """The part of settings.json that every run has."""

    command: str
    environment: str
    version: str
    seed: int
    files: tuple[str, ...]


class RoundRecord(Record):
    """A line of metrics.jsonl, of those commands that train; accuracies in percent."""

    method: str
    trial: Natural
    round: Natural
    accuracy: float
    class_accuracy: tuple[float | None, ...]
    weights: tuple[float, ...]
    rejected: dict[str, str] = Field(default_factory=dict)


class ClientsRecord(Record):
    """A line of client_accuracy.jsonl, in percent."""

    method: str
    trial: Natural
    client_accuracy: tuple[float, ...]


@dataclass(frozen=True)
class SetAsideRecord:
    """A client whose updates were not used in some of a method's rounds, all trials together; why, the last time."""

    client: str
    times: int
    reason: str


@dataclass(frozen=True, eq=False)
class MethodRecord:
    """What a method did, in percent: accuracy [trials, rounds], of the final models by class [trials, C] (NaN without
    test samples) and by client [trials, K] (none in old folders); the weights used [rounds, K], as a mean of trials."""

    name: str
    accuracy: Floats
    class_accuracy: Floats
    weights: Floats
    client_accuracy: Floats | None = None
    rejected: tuple[SetAsideRecord, ...] = ()

    @property
    def finals(self) -> Floats:
        """Accuracy after the last round of every trial."""
        return self.accuracy[:, -1]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run: its settings as they stand in the file, and what was found of its records."""

    label: str
    command: str
    environment: str
    version: str
    seed: int
    settings: Mapping[str, Any]
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    federation: FederationRecord | None = None
    methods: tuple[MethodRecord, ...] = ()
    learned: Mapping[str, LearnedWeights] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    stopped: bool = False


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs in some folders, each with a label of its own."""
    if twice := next((folder for i, folder in enumerate(folders) if folder in folders[:i]), None):
        raise InputError(f"{twice} is named twice; name each run once.")
    runs = [_read(folder) for folder in folders]
    return [replace(run, label=label) for run, label in zip(runs, distinct([run.label for run in runs]), strict=True)]


def _read(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; give one that `fedunfold learn`, `run` or `compare` left.")
    unfinished = ResumeDir(folder)
    if not (folder / SETTINGS).is_file():
        if unfinished.exists or (folder / PROGRESS).is_file():
            raise InputError(f"the run in {folder} has not ended; go on with it by the same command.")
        raise InputError(
            f"{folder} is not a run folder: it has no {SETTINGS}; give one that `fedunfold learn`, `run` or "
            "`compare` left."
        )
    text = _text(folder / SETTINGS)
    said = _parsed(SettingsRecord, text, folder / SETTINGS)
    _refuse_newer(said.version, folder)
    federation = None
    if (folder / FEDERATION).is_file():
        federation = _parsed(FederationRecord, _text(folder / FEDERATION), folder / FEDERATION)
    methods = _methods(folder, federation) if said.command != "learn" else ()
    names = {file_name(method.name): method.name for method in methods}
    if said.command == "learn":
        names = {LEARNED: "learned"}
    learned = _learned(folder, said.files, names)
    return RunRecord(
        label=plain(folder.resolve().name or str(folder)),
        command=plain(said.command),
        environment=plain(said.environment),
        version=plain(said.version),
        seed=said.seed,
        settings=TypeAdapter(dict[str, Any]).validate_json(text),
        clients=distinct([plain(key) for key in _keys(folder, federation, methods, learned)]),
        classes=distinct(_class_names(federation, methods)),
        federation=federation,
        methods=methods,
        learned=learned,
        missing=tuple(_missing(federation, methods)),
        stopped=unfinished.exists,
    )


def _refuse_newer(version: str, folder: Path) -> None:
    """Older folders are understood; what a newer version writes cannot be known."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if not found:
        raise InputError(f"{folder / SETTINGS} is damaged: '{plain(version)}' is no version; make the run again.")
    if tuple(map(int, found.groups())) > tuple(map(int, VERSION.split(".")[:2])):
        raise InputError(
            f"{folder} was written by fedunfold {plain(version)}, and this is {VERSION}; make the report with that one."
        )


def _methods(folder: Path, federation: FederationRecord | None) -> tuple[MethodRecord, ...]:
    """metrics.jsonl and client_accuracy.jsonl by method, in the order in which they were run."""
    lines: dict[str, dict[int, list[RoundRecord]]] = {}
    for where, line in _lines(RoundRecord, folder / METRICS):
        trials = lines.setdefault(line.method, {})
        rounds = trials.setdefault(line.trial, [])
        if line.round != len(rounds) or (line.trial and line.trial - 1 not in trials):
            raise InputError(f"{where} is damaged: trial {line.trial} round {line.round} is out of turn; run it again.")
        rounds.append(line)
    served: dict[str, list[tuple[float, ...]]] = {}
    for _, end in _lines(ClientsRecord, folder / CLIENT_ACCURACY):
        served.setdefault(end.method, []).append(end.client_accuracy)
    methods = [_method(name, list(trials.values()), served.get(name), folder) for name, trials in lines.items()]
    names = distinct([method.name for method in methods])
    methods = [replace(method, name=name) for method, name in zip(methods, names, strict=True)]
    shapes = {(method.weights.shape[1], method.class_accuracy.shape[1]) for method in methods}
    if federation is not None:
        shapes.add((len(federation.clients), federation.classes))
    if len(shapes) > 1:
        raise InputError(f"{folder / METRICS} is damaged: numbers of clients or classes differ; make the run again.")
    return tuple(methods)


def _method(
    name: str, trials: Sequence[Sequence[RoundRecord]], served: Sequence[Sequence[float]] | None, folder: Path
) -> MethodRecord:
    try:
        by_client = None if served is None else np.array(served, dtype=np.float64)
        method = MethodRecord(
            name=plain(name),
            accuracy=np.array([[line.accuracy for line in rounds] for rounds in trials], dtype=np.float64),
            class_accuracy=np.array([rounds[-1].class_accuracy for rounds in trials], dtype=np.float64),
            weights=np.mean([[line.weights for line in rounds] for rounds in trials], axis=0, dtype=np.float64),
            client_accuracy=by_client,
            rejected=tuple(_set_aside(trials)),
        )
        if by_client is not None and by_client.shape != (len(trials), method.weights.shape[1]):
            raise ValueError(f"{CLIENT_ACCURACY} does not fit {METRICS}")
    except ValueError as error:  # numpy's word for lists of different lengths
        raise InputError(
            f"{folder / METRICS} is damaged: the lines of method '{plain(name)}' do not fit together; "
            "make the run again."
        ) from error
    return method


def _set_aside(trials: Sequence[Sequence[RoundRecord]]) -> Iterator[SetAsideRecord]:
    """Who was set aside, the most often first."""
    reasons: dict[str, list[str]] = {}
    for rounds in trials:
        for line in rounds:
            for client, reason in line.rejected.items():
                reasons.setdefault(client, []).append(reason)
    for client, own in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield SetAsideRecord(plain(client), len(own), plain(own[-1]))


def _learned(folder: Path, files: Sequence[str], names: Mapping[str, str]) -> dict[str, LearnedWeights]:
    """The weights that a run learned, by the name that belongs to their file, or the file's own."""
    found = {}
    for file in files:
        if file.endswith(".safetensors") and file != MODEL and Path(file).name == file:
            _refuse_large(folder / file, WEIGHTS_LIMIT)
            stem = file.removesuffix(".safetensors")
            found[names.get(stem, plain(stem))] = LearnedWeights.load(folder / file)
    return found


def _keys(
    folder: Path,
    federation: FederationRecord | None,
    methods: Sequence[MethodRecord],
    learned: Mapping[str, LearnedWeights],
) -> Sequence[str]:
    """The clients' names: of the federation, or of weights learned for it, or made up in old folders."""
    known = [federation.keys] if federation is not None else []
    known += [weights.client_ids for weights in learned.values()]
    if any(keys != known[0] for keys in known):
        raise InputError(f"{folder} is damaged: its weights were learned for other clients; make the run again.")
    count = methods[0].weights.shape[1] if methods else 0
    if known and count not in (0, len(known[0])):
        raise InputError(f"{folder} is damaged: its records and its weights differ in their clients; run it again.")
    return known[0] if known else [f"client {k + 1}" for k in range(count)]


def _class_names(federation: FederationRecord | None, methods: Sequence[MethodRecord]) -> list[str]:
    """What the classes are called, or else their numbers."""
    if federation is not None and federation.class_names is not None:
        return [plain(name) or str(label) for label, name in enumerate(federation.class_names)]
    count = methods[0].class_accuracy.shape[1] if methods else 0
    return [str(label) for label in range(count if federation is None else federation.classes)]


def _missing(federation: FederationRecord | None, methods: Sequence[MethodRecord]) -> Iterator[str]:
    if federation is None:
        yield f"no {FEDERATION}: who holds which labels, epochs and reliability are not known."
    if not methods:
        yield "no test accuracies: the folder holds weights alone; fedunfold compare measures what they bring."
    if any(method.client_accuracy is None for method in methods):
        yield f"no {CLIENT_ACCURACY} for every method: how well each client is served is not known."


def _lines(kind: type[Parsed], file: Path) -> Iterator[tuple[str, Parsed]]:
    """Every line with where it stands; none where there is no such file."""
    if not file.is_file():
        return
    for number, line in enumerate(_text(file).splitlines(), 1):
        where = f"{file}, line {number},"
        yield where, _parsed(kind, line, where)


def _parsed(kind: type[Parsed], text: str, where: object) -> Parsed:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{explain(error, f'{where} is damaged: ')}; make the run again.") from error


def _text(file: Path) -> str:
    _refuse_large(file, LIMITS[file.name])
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{file} cannot be read: {reason}; make the run again.") from error


def _refuse_large(file: Path, limit: int) -> None:
    if file.is_file() and file.stat().st_size > limit * MEBIBYTE:
        raise InputError(f"{file} is larger than {limit} MiB, more than a report can show; use fewer rounds or trials.")
