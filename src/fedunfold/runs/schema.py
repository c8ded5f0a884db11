"""The files of a run folder: their names, what must be in those that are read again, and what is read from them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedunfold.config import Environment
from fedunfold.core.settings import Count, Natural
from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.rules.learned import LearnedWeights
from fedunfold.runs.influence import Influence
from fedunfold.runs.labels import plain

SETTINGS = "settings.json"
ENVIRONMENT = "environment.toml"
FEDERATION = "federation.json"
METRICS = "metrics.jsonl"
CLIENT_SCORES = "client_scores.jsonl"
RESULT = "result.json"
MODEL = "model.safetensors"
MODEL_RECORD = "model.json"
LEARNED = "weights.safetensors"
RULE = "rule.safetensors"
PRETRAINING = "settings.toml"
CARD = "card.md"
REPORT = "report.html"  # made later, from the others; it is deleted with them

MOST_WEIGHTS = 1000
"""Of more clients, a round's line has the weights of those alone that took part."""

Floats = NDArray[np.float64]


def file_name(name: str) -> str:
    """A method's or environment's name as part of a file name.

    >>> file_name("duw-fedavg prox:mu=0.1")
    'duw-fedavg-prox-mu=0.1'
    """
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", name)


class Record(BaseModel):
    """Base of what is read from a run's files; fields that another version added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ClientRecord(Record):
    """A client of the federation.

    Attributes:
        key: Its name.
        samples: How many training samples it holds.
        label_counts: How many of them are of each class.
        epochs: How many epochs it trains, in every round or round by round.
        participation_probability: In which fraction of the rounds it is reachable.
        held_out: How many samples it held out; 0 also where that is not on record.
    """

    key: str
    samples: Count
    label_counts: tuple[Natural, ...]
    epochs: Count | tuple[Count, ...]
    participation_probability: float = Field(ge=0, le=1)
    held_out: Natural = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The classes it has samples of."""
        return tuple(label for label, count in enumerate(self.label_counts) if count)


class FederationRecord(Record):
    """federation.json: the federation that a run was made on, so that a report needs no data.

    Attributes:
        environment: The environment's name.
        description: What it says about itself.
        digest: Stands for data, clients, model and local training; equal for runs that can be compared.
        task: What a model was trained for.
        classes: How many classes there are; 1 for a task without.
        class_names: Their names in the order of their numbers, where they have some.
        test_samples: Size of the test set.
        rounds: T.
        clients_per_round: How many clients are sampled in a round; None for all of them.
        clients: All K of them.
    """

    environment: str
    description: str = ""
    digest: str
    task: str = "classification"
    classes: Count
    class_names: tuple[str, ...] | None = None
    test_samples: Natural
    rounds: Count
    clients_per_round: Count | None = None
    clients: tuple[ClientRecord, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.keys)) < len(self.clients):
            raise ValueError("it names a client twice")
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise ValueError(f"it names {len(self.class_names)} of {self.classes} classes")
        for client in self.clients:
            if len(client.label_counts) != self.classes:
                raise ValueError(f"client {client.key} counts {len(client.label_counts)} of {self.classes} classes")
        return self

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """The record of an environment's federation."""
        data, kept = environment.load(), environment.load_held_out()
        kept_sizes = [0] * len(data.sizes) if kept is None else kept.sizes
        held = zip(environment.clients, data.sizes, data.label_counts.tolist(), kept_sizes, strict=True)
        return cls.model_validate(
            {
                **environment.model_dump(include={"description", "class_names", "rounds", "clients_per_round"}),
                "environment": environment.name,
                "digest": environment.digest(data),
                "task": data.task.name,
                "classes": data.classes,
                "test_samples": len(data.y_test),
                "clients": [
                    {**client.model_dump(), "samples": n, "label_counts": counts, "held_out": own}
                    for client, n, counts, own in held
                ],
            }
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(client.key for client in self.clients)

    @property
    def shares(self) -> tuple[float, ...]:
        """N_k/N: each client's weight by size."""
        total = sum(client.samples for client in self.clients)
        return tuple(client.samples / total for client in self.clients)


class MetricRecord(Record):
    """The task's primary metric.

    Attributes:
        name: What it is called.
        greater_is_better: Its direction.
        percentages: The metrics that are in percent.
    """

    name: str
    greater_is_better: bool
    percentages: frozenset[str]

    @property
    def primary(self) -> PrimaryMetric:
        """The same for whoever shows it."""
        return PrimaryMetric(plain(self.name), self.greater_is_better, frozenset(map(plain, self.percentages)))


class SettingsRecord(Record):
    """The part of settings.json that a report needs.

    Attributes:
        command: What was run: learn, run, compare or demo.
        environment: The environment's name.
        metric: What models were compared by; a classifier's accuracy where nothing is said.
        version: Of fedunfold.
        files: Names of the files that the run left.
    """

    command: str
    environment: str
    metric: MetricRecord = MetricRecord.model_validate(ACCURACY.describe())
    version: str
    files: tuple[str, ...]


class RoundRecord(Record):
    """A line of metrics.jsonl, of those commands that train.

    Attributes:
        method: The method's name.
        trial: Its number, from 0.
        round: Its number, from 0.
        metrics: All metrics on the test set by name, fractions in percent; None for one that is not known.
        class_accuracy: By class, in percent; None for a class without test samples.
        weights: Θ^(t) as used; none of a reference. Where `clients` are named, theirs alone.
        participated: Who took part; empty where that is not on record.
        rejected: Why a client's update was rejected, by client.
        clients: The numbers of those who took part, in a federation of many; None where all have a weight.
        time: When it ended, in simulated seconds; None where there is no time.
        staleness: The mean staleness of its updates, in asynchronous rounds.
    """

    method: str
    trial: Natural
    round: Natural
    metrics: dict[str, float | None]
    class_accuracy: tuple[float | None, ...]
    weights: tuple[float, ...]
    participated: tuple[bool, ...] = ()
    rejected: dict[str, str] = Field(default_factory=dict)
    clients: tuple[Natural, ...] | None = None
    time: float | None = None
    staleness: float | None = None

    def all_weights(self, clients: int) -> Floats:
        """Θ^(t) of all K clients, 0 where a client is not named; ValueError where the line is not of so many."""
        if self.clients is None:
            return np.array(self.weights, dtype=np.float64)
        whole = np.zeros(clients)
        if len(self.clients) != len(self.weights) or max(self.clients, default=0) >= clients:
            raise ValueError("it names other clients than it weighs")
        whole[list(self.clients)] = self.weights
        return whole

    def took_part(self, clients: int) -> NDArray[np.bool_]:
        """Who of all K clients took part; a line that does not say is of all of them."""
        if self.clients is None:
            return np.array(self.participated or (True,) * len(self.weights), dtype=bool)
        return np.isin(np.arange(clients), self.clients)

    @model_validator(mode="before")
    @classmethod
    def _of_a_classifier(cls, line: Any) -> Any:
        """A line without metrics has an accuracy."""
        if isinstance(line, dict) and "metrics" not in line and "accuracy" in line:
            return line | {"metrics": {"accuracy": line["accuracy"]}}
        return line


class ClientsRecord(Record):
    """A line of client_scores.jsonl.

    Attributes:
        method: The method's name.
        trial: Its number, from 0.
        client_scores: The primary metric of the final model on each client's own training data, fractions in percent;
            None where it is not known.
        held_out: The same on what each client held out, where they did.
        fine_tuned: That of the final models after each client has trained them further, where they did.
    """

    method: str
    trial: Natural
    client_scores: tuple[float | None, ...]
    held_out: tuple[float | None, ...] | None = None
    fine_tuned: tuple[float | None, ...] | None = None


# --- what is read from them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejectedClient:
    """A client whose updates were rejected in some of a method's rounds.

    Attributes:
        client: Its name.
        times: In how many rounds, over all trials.
        reason: Why, the last time.
    """

    client: str
    times: int
    reason: str


@dataclass(frozen=True, eq=False)
class MethodRecord:
    """What a method did in a run; fractions in percent, NaN for what is not known.

    Attributes:
        name: The method's name.
        scores: The primary metric on the test set, [trials, rounds].
        class_accuracy: Of the final models by class, [trials, C], or [trials, 0] for a task without classes.
        weights: Those used, as a mean of the trials, [rounds, K]; [rounds, 0] for a reference.
        client_scores: The primary metric of the final models on each client's own training data, [trials, K].
        rejected: The clients whose updates were rejected, the most often rejected first.
        metrics: All metrics of the final models on the test set by name, [trials].
        held_out: The primary metric of the final models on what each client held out, [trials, K]; None where they held
            out nothing.
        fine_tuned: The same of final models that each client trained further, [trials, K]; None where none did.
        influence: How much single clients counted; None of a reference.
    """

    name: str
    scores: Floats
    class_accuracy: Floats
    weights: Floats
    client_scores: Floats
    rejected: tuple[RejectedClient, ...] = ()
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    held_out: Floats | None = None
    fine_tuned: Floats | None = None
    influence: Influence | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it is what federated methods are held against, and none itself."""
        return not self.weights.shape[1]

    @property
    def finals(self) -> Floats:
        """The primary metric after the last round of every trial."""
        return self.scores[:, -1]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run that has results. All names are fit to be shown.

    Attributes:
        label: The folder's name, distinct among runs that are read together.
        environment: The environment's name.
        settings: settings.json as it is.
        clients: The clients' names.
        classes: The classes' names, or else their numbers.
        federation: The federation it was made on.
        methods: What each method did, in the order in which they were run; none where weights were only learned.
        learned: Learned weights by method.
        left_out: By method, the primary metric on each client of models that were trained without it, [K].
        stopped: Whether it was interrupted, and can be resumed.
        primary: What the methods are compared by.
    """

    label: str
    environment: str
    settings: Mapping[str, Any]
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    federation: FederationRecord
    methods: tuple[MethodRecord, ...] = ()
    learned: Mapping[str, LearnedWeights] = field(default_factory=dict)
    left_out: Mapping[str, Floats] = field(default_factory=dict)
    stopped: bool = False
    primary: PrimaryMetric = ACCURACY
