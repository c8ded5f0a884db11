"""The one reader of a run folder, which may be old, damaged, or somebody else's. Nothing in it is executed."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from fedunfold.core.errors import InputError
from fedunfold.core.settings import explain
from fedunfold.io.atomic import is_folder, is_plain_file, read_text, size_of
from fedunfold.io.limits import FEDERATION_BYTES, LINES_BYTES, RECORD_BYTES, WEIGHTS_BYTES, LimitError
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs import schema
from fedunfold.runs.influence import Influence
from fedunfold.runs.labels import distinct, plain
from fedunfold.runs.left_out import LeftOutRecord
from fedunfold.runs.manifest import RunManifest
from fedunfold.runs.resume import ResumeDir
from fedunfold.tracking.jsonl import PROGRESS
from fedunfold.version import VERSION

LIMITS = {
    schema.FEDERATION: FEDERATION_BYTES,
    **dict.fromkeys((schema.METRICS, schema.CLIENT_SCORES, PROGRESS), LINES_BYTES),
}

Parsed = TypeVar("Parsed", bound=schema.Record)


class DamagedRunError(InputError):
    """A file of a run is missing, or not what was written.

    Attributes:
        problem: What is wrong with it, without the folder and what to do.
    """

    def __init__(self, file: Path, problem: str, line: int | None = None) -> None:
        where = "" if line is None else f", line {line},"
        super().__init__(f"{file}{where} {problem}; make the run again.")
        self.problem = f"{file.name}{where} {problem}"


# --- single files ------------------------------------------------------------------------------------------


def read_file(file: Path) -> str:
    """The text of one of a run's files.

    Raises:
        DamagedRunError: It cannot be read, or is no text.
        LimitError: It is larger than allowed.
    """
    try:
        return read_text(file, LIMITS.get(file.name, RECORD_BYTES))
    except LimitError:
        raise
    except (OSError, InputError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DamagedRunError(file, f"cannot be read: {reason}") from error


def parse_object(text: str, file: Path, line: int | None = None) -> dict[str, Any]:
    """A JSON object in a file, whatever is in it.

    Args:
        text: The JSON.
        file: Where it is from.
        line: The line in the file, from 1.

    Raises:
        DamagedRunError: There is none.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedRunError(file, "is no JSON", line) from error
    if not isinstance(content, dict):
        raise DamagedRunError(file, "holds no JSON object", line)
    return content


def parse_record(kind: type[Parsed], text: str, file: Path, line: int | None = None) -> Parsed:
    """A record of that kind in a file.

    Args:
        kind: What it has to be.
        text: The JSON.
        file: Where it is from.
        line: The line in the file, from 1.

    Raises:
        DamagedRunError: A field is missing or wrong.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DamagedRunError(file, f"is damaged: {explain(error)}", line) from error


def read_settings(folder: Path) -> dict[str, Any]:
    """settings.json as it is.

    Raises:
        DamagedRunError: It is missing or damaged.
    """
    file = folder / schema.SETTINGS
    content = parse_object(read_file(file), file)
    try:
        json.dumps(content, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise DamagedRunError(file, "has numbers that are none") from error
    return content


def holds_run(folder: Path) -> bool:
    """Whether a run left its settings in a folder, readable or not."""
    return os.path.lexists(folder / schema.SETTINGS)


def has_ended(folder: Path) -> bool:
    """Whether a run is in a folder that cannot be resumed."""
    return holds_run(folder) and not ResumeDir(folder).exists


def list_files(folder: Path) -> list[Path]:
    """The files of the run in a folder that exist, settings.json last; never one outside, whatever is listed."""
    try:
        listed = read_settings(folder).get("files")
    except InputError:
        listed = None
    known = *(listed if isinstance(listed, list) else ()), schema.REPORT, schema.SETTINGS
    named = (folder / str(name) for name in known)
    return [file for file in dict.fromkeys(named) if file.parent == folder and is_plain_file(file)]


# --- whole runs --------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> RunManifest:
    """What the run in a folder is repeated by.

    Raises:
        InputError: There is no run, it has not ended, or its settings are damaged.
    """
    file = settings_file(folder)
    if ResumeDir(folder).exists:
        raise InputError(f"the run in {folder} has not ended; resume it first.")
    return parse_record(RunManifest, read_file(file), file)


def read_runs(folders: Sequence[Path]) -> list[schema.RunRecord]:
    """The runs in some folders, each with a label of its own.

    Args:
        folders: Each once.

    Raises:
        InputError: A folder is named twice, holds no run or one without results, is damaged, or was written by a
            newer version.
    """
    if twice := next((folder for i, folder in enumerate(folders) if folder in folders[:i]), None):
        raise InputError(f"{twice} is named twice; name each run once.")
    runs = [_read_run(folder) for folder in folders]
    return [replace(run, label=label) for run, label in zip(runs, distinct([run.label for run in runs]), strict=True)]


def settings_file(folder: Path) -> Path:
    """settings.json, where there is a run with results."""
    if not is_folder(folder):
        raise InputError(f"there is no folder {folder}; give the folder of a run.")
    if not is_plain_file(folder / schema.SETTINGS):
        if ResumeDir(folder).exists or is_plain_file(folder / PROGRESS):
            raise InputError(f"the run in {folder} has not ended; resume it first.")
        raise InputError(f"{folder} is not a run folder: it has no {schema.SETTINGS}; give the folder of a run.")
    return folder / schema.SETTINGS


def _read_run(folder: Path) -> schema.RunRecord:
    file = settings_file(folder)
    raw = read_settings(folder)
    if raw.get("command") == "pretrain":
        raise InputError(f"{folder} holds a pre-trained rule and no run of a federation; read its {schema.CARD}.")
    if raw.get("command") == "learn" and "fine_tuning" in raw:
        raise InputError(f"{folder} holds a fine-tuned rule and no run of a federation; read its {schema.METRICS}.")
    settings = parse_record(schema.SettingsRecord, read_file(file), file)
    _refuse_newer(settings.version, folder)
    file = folder / schema.FEDERATION
    federation = parse_record(schema.FederationRecord, read_file(file), file)
    tested = settings.command != "learn" and schema.METRICS in settings.files
    methods = _read_methods(folder, federation, settings.metric.name) if tested else ()
    left_out = {} if tested or schema.RESULT not in settings.files else _read_left_out(folder, federation)
    names = {schema.LEARNED: "learned"}
    names |= {f"{schema.file_name(method.name)}.safetensors": method.name for method in methods}
    learned = _read_weights(folder, settings.files, names)
    if any(weights.client_ids != federation.keys for weights in learned.values()):
        raise DamagedRunError(folder, "is damaged: its weights were learned for other clients")
    classes = federation.class_names or [""] * federation.classes
    return schema.RunRecord(
        label=plain(folder.resolve().name or str(folder)),
        environment=plain(settings.environment),
        settings=read_settings(folder),
        clients=distinct([plain(key) for key in federation.keys]),
        classes=distinct([plain(name) or str(label) for label, name in enumerate(classes)]),
        federation=federation,
        methods=methods,
        learned=learned,
        left_out=left_out,
        stopped=ResumeDir(folder).exists,
        primary=settings.metric.primary,
    )


def _refuse_newer(version: str, folder: Path) -> None:
    """Older folders are understood; what a newer version writes cannot be known."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if not found:
        raise DamagedRunError(folder / schema.SETTINGS, f"is damaged: '{plain(version)}' is no version")
    if tuple(map(int, found.groups())) > tuple(map(int, VERSION.split(".")[:2])):
        raise InputError(
            f"{folder} was written by fedunfold {plain(version)}, and this is {VERSION}; read it with that one."
        )


def _read_methods(folder: Path, federation: schema.FederationRecord, primary: str) -> tuple[schema.MethodRecord, ...]:
    """metrics.jsonl and client_scores.jsonl by method, in the order in which they were run."""
    file = folder / schema.METRICS
    lines: dict[str, dict[int, list[schema.RoundRecord]]] = {}
    for number, line in _read_lines(schema.RoundRecord, file):
        trials = lines.setdefault(line.method, {})
        rounds = trials.setdefault(line.trial, [])
        if line.round != len(rounds) or (line.trial and line.trial - 1 not in trials):
            raise DamagedRunError(file, f"is damaged: trial {line.trial} round {line.round} is out of turn", number)
        if primary not in line.metrics:
            raise DamagedRunError(file, f"is damaged: it has no {plain(primary)}", number)
        rounds.append(line)
    served: dict[str, list[schema.ClientsRecord]] = {}
    for _, end in _read_lines(schema.ClientsRecord, folder / schema.CLIENT_SCORES):
        served.setdefault(end.method, []).append(end)
    methods = [
        _join_trials(name, list(trials.values()), served.get(name, []), federation, file, primary)
        for name, trials in lines.items()
    ]
    names = distinct([method.name for method in methods])
    return tuple(replace(method, name=name) for method, name in zip(methods, names, strict=True))


def _join_trials(
    name: str,
    trials: Sequence[Sequence[schema.RoundRecord]],
    served: Sequence[schema.ClientsRecord],
    federation: schema.FederationRecord,
    file: Path,
    primary: str,
) -> schema.MethodRecord:
    """The rounds of all trials of a method as arrays."""
    clients, classes = len(federation.clients), federation.classes if federation.classes > 1 else 0
    lengths = [len(rounds) for rounds in trials]
    try:
        if len(set(lengths)) > 1 and trials[0][0].time is None:
            raise ValueError("trials have different numbers of rounds, and no time that ended them")
        used = [[line.all_weights(clients) for line in rounds] for rounds in trials]
        took = [[line.took_part(clients) for line in rounds] for rounds in trials]
        method = schema.MethodRecord(
            name=plain(name),
            scores=np.array(
                [[line.metrics[primary] for line in _lasting(rounds, max(lengths))] for rounds in trials],
                dtype=np.float64,
            ),
            class_accuracy=np.array([rounds[-1].class_accuracy for rounds in trials], dtype=np.float64),
            weights=np.mean([own[: min(lengths)] for own in used], axis=0),
            client_scores=np.array([end.client_scores for end in served], dtype=np.float64),
            rejected=_count_rejected(trials),
            metrics={
                plain(metric): np.array([rounds[-1].metrics.get(metric) for rounds in trials], dtype=np.float64)
                for metric in trials[0][-1].metrics
            },
            held_out=_by_client([end.held_out for end in served]),
            fine_tuned=_by_client([end.fine_tuned for end in served]),
            influence=Influence.of(used, took) if any(line.weights for line in trials[0]) else None,
        )
        by_client = [s for s in (method.client_scores, method.held_out, method.fine_tuned) if s is not None]
        weighed = 0 if method.is_reference else clients
        expected = (len(trials), classes), (min(lengths), weighed)
        if (method.class_accuracy.shape, method.weights.shape) != expected or any(
            scores.shape != (len(trials), clients) for scores in by_client
        ):
            raise ValueError("numbers of trials, clients or classes differ")
    except ValueError as error:  # also numpy's word for lists of different lengths
        problem = f"is damaged: the lines of method '{plain(name)}' do not fit together, or not the federation"
        raise DamagedRunError(file, problem) from error
    return method


def _lasting(rounds: Sequence[schema.RoundRecord], count: int) -> list[schema.RoundRecord]:
    """So many rounds: a trial that ended earlier stays at its last."""
    return [rounds[min(t, len(rounds) - 1)] for t in range(count)]


def _by_client(trials: Sequence[tuple[float | None, ...] | None]) -> schema.Floats | None:
    """Scores that are in every trial's line or in none."""
    return np.array(trials, dtype=np.float64) if trials and trials[0] is not None else None


def _read_left_out(folder: Path, federation: schema.FederationRecord) -> dict[str, schema.Floats]:
    """What methods reach on each client without it, from result.json."""
    file = folder / schema.RESULT
    rows = parse_record(LeftOutRecord, read_file(file), file).methods
    if any(row.left_out.keys() != set(federation.keys) for row in rows):
        raise DamagedRunError(file, "is damaged: its clients are not those of the federation")
    names = distinct([plain(row.method) for row in rows])
    scores = [np.array([row.left_out[key] for key in federation.keys], dtype=np.float64) for row in rows]
    return dict(zip(names, scores, strict=True))


def _count_rejected(trials: Sequence[Sequence[schema.RoundRecord]]) -> tuple[schema.RejectedClient, ...]:
    """Whose updates were rejected, the most often rejected first."""
    rejected = [pair for rounds in trials for line in rounds for pair in line.rejected.items()]
    last, counts = dict(rejected), Counter(client for client, _ in rejected).most_common()
    return tuple(schema.RejectedClient(plain(client), times, plain(last[client])) for client, times in counts)


def _read_weights(folder: Path, files: Sequence[str], names: Mapping[str, str]) -> dict[str, LearnedWeights]:
    """The weights that a run learned, by the name that belongs to their file, or the file's own."""
    found = {}
    for file in files:
        if file.endswith(".safetensors") and file != schema.MODEL and Path(file).name == file:
            path = folder / file
            if is_plain_file(path):
                WEIGHTS_BYTES.check(size_of(path), f"{path}: ")
            found[names.get(file, plain(file.removesuffix(".safetensors")))] = LearnedWeights.load(path)
    return found


def _read_lines(kind: type[Parsed], file: Path) -> Iterator[tuple[int, Parsed]]:
    """Every line with its number, from 1."""
    for number, line in enumerate(read_file(file).splitlines(), 1):
        yield number, parse_record(kind, line, file, number)
