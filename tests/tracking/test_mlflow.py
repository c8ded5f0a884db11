"""What MLflow is asked to store keeps to its limits, whatever clients and methods are called."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedunfold as fu
from fedunfold.tracking import mlflow
from tests.support.federations import tiny


class Store:
    """A client of MLflow that only remembers."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.status = ""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def log_batch(self, run: str, **entries: Any) -> None:
        assert run == "fedunfold/mine"
        self.batches.append(entries)

    def set_terminated(self, run: str, status: str) -> None:
        self.status = status


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(mlflow, "_client", lambda _: store)
    return store


@pytest.mark.parametrize(
    ("failure", "status"), [(None, "FINISHED"), (KeyboardInterrupt(), "KILLED"), (ValueError(), "FAILED")]
)
def test_how_a_run_ended(store: Store, failure: BaseException | None, status: str) -> None:
    tracker = mlflow.MLflow("http://nowhere", "mine")
    tracker.on_start({"clients": []})
    tracker.on_end(failure)
    assert store.status == status


def test_many_and_long_settings_are_sent_in_parts(store: Store) -> None:
    settings = {"clients": ["x" * 100] * 100, **{f"setting {i}": i for i in range(250)}}
    mlflow.MLflow("http://nowhere", "mine").on_start(settings)
    assert [len(batch["params"]) for batch in store.batches] == [100, 100, 51]
    sent = {entry.key: entry.value for batch in store.batches for entry in batch["params"]}
    assert len(sent["clients"]) == 6000
    assert sent["setting 249"] == "249"


def test_every_metric_has_its_step(store: Store) -> None:
    result = fu.run(tiny(), callback=mlflow.MLflow("http://nowhere", "mine"))
    sent = [metric for batch in store.batches for metric in batch.get("metrics", ())]
    losses = [(metric.step, metric.value) for metric in sent if metric.key == "fedavg/trial-0/loss"]
    assert losses == [(t, seen.loss) for t, seen in enumerate(result.evaluations)]


@given(st.text(max_size=300) | st.sampled_from(["clinic #1 ü", "a//b", "../x", "/x", "x/", "..", "a" * 400]))
def test_names_are_such_as_mlflow_takes(key: str) -> None:
    from mlflow.utils import validation

    checks: Any = validation
    checks._validate_metric_name(mlflow._name(f"fedavg/learning/mean_weight/{key}"))
    checks._validate_param_name(mlflow._name(key))
