"""A run in an MLflow store: a database file, or the server that the user names."""

import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedunfold.core.errors import InputError
from fedunfold.tracking.scalars import Scalar, ScalarCallback, flattened

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "fedunfold"
# MLflow's own limits: of a name, of a parameter's value, and of one request.
LONGEST_NAME, LONGEST_VALUE, MOST_PARAMETERS, MOST_METRICS = 250, 6000, 100, 1000

T = TypeVar("T")


class MLflow(ScalarCallback):
    """Writes a run to the experiment "fedunfold": settings as parameters, the scalars of `ScalarCallback` as metrics
    with their steps, and the files that the run leaves as artifacts. MLflow's own telemetry stays off.

    Args:
        store: A database file, with a folder for artifacts beside it, or the address of a server.
        name: What the run is called there.

    Raises:
        InputError: MLflow is not installed.
    """

    def __init__(self, store: Path | str, name: str) -> None:
        if any(find_spec(module) is None for module in ("mlflow", "sqlalchemy", "alembic")):
            raise InputError("tracking with MLflow needs it: pip install 'fedunfold[tracking]'.")
        self.store, self.name = store, name

    def on_start(self, settings: Mapping[str, Any]) -> None:
        super().on_start(settings)
        self._client = _client(self.store)
        self._run = self._client.create_run(self._experiment(), run_name=self.name).info.run_id
        from mlflow.entities import Param

        parameters = [Param(_name(key), str(value)[:LONGEST_VALUE]) for key, value in flattened(settings).items()]
        for some in _chunks(parameters, MOST_PARAMETERS):
            self._client.log_batch(self._run, params=some)

    def on_end(self, failure: BaseException | None) -> None:
        status = "FINISHED" if failure is None else "KILLED" if isinstance(failure, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(self._run, status)

    def on_artifacts(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._run, str(file))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None
        if isinstance(self.store, Path):
            artifacts = self.store.absolute().with_name(f"{self.store.stem}-artifacts").as_uri()
        return self._client.create_experiment(EXPERIMENT, artifact_location=artifacts)

    def log_scalars(self, scalars: Sequence[Scalar]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_name(name), value, now, step) for name, value, step in scalars]
        for some in _chunks(metrics, MOST_METRICS):
            self._client.log_batch(self._run, metrics=some)


def _client(store: Path | str) -> "MlflowClient":
    """A client without telemetry, which gives up soon where a server does not answer."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow about the versions of its own dependencies
        from mlflow import MlflowClient

        for chatty in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        if isinstance(store, Path):
            store.parent.mkdir(parents=True, exist_ok=True)
            return MlflowClient(tracking_uri=f"sqlite:///{store.absolute()}")
        return MlflowClient(tracking_uri=store)


def _name(text: str) -> str:
    """MLflow takes letters, digits and a few signs, and no path that leads anywhere but down."""
    parts = re.sub(r"[^\w\-. :/]", "-", text)[:LONGEST_NAME].split("/")
    return "/".join(part if part.strip(".") else "-" for part in parts)


def _chunks(entries: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(entries), most):
        yield entries[first : first + most]
