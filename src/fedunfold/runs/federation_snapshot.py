"""What a run's folder says of its federation, so that a report can be made when the data are gone."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedunfold.config import Environment
from fedunfold.core.settings import Count, Natural

FEDERATION = "federation.json"


class Record(BaseModel):
    """Part of a run's records; what another version adds to them is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ClientRecord(Record):
    """A client: what it holds, how much it trains a round, and how often it is reachable."""

    key: str
    samples: Count
    label_counts: tuple[Natural, ...]
    epochs: Count | tuple[Count, ...]
    participation_probability: float = Field(ge=0, le=1)

    @property
    def held(self) -> tuple[int, ...]:
        """The classes it has samples of."""
        return tuple(label for label, count in enumerate(self.label_counts) if count)


class FederationRecord(Record):
    """Who takes part with what, and the digest that stands for it."""

    environment: str
    description: str = ""
    digest: str
    classes: Count
    class_names: tuple[str, ...] | None = None
    test_samples: Natural
    rounds: Count
    clients_per_round: Count | None = None
    clients: tuple[ClientRecord, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len({client.key for client in self.clients}) < len(self.clients):
            raise ValueError("it names a client twice")
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise ValueError(f"it names {len(self.class_names)} of {self.classes} classes")
        for client in self.clients:
            if len(client.label_counts) != self.classes:
                raise ValueError(f"client {client.key} counts {len(client.label_counts)} of {self.classes} classes")
        return self

    @classmethod
    def of(cls, environment: Environment) -> Self:
        data = environment.load()
        return cls(
            environment=environment.name,
            description=environment.description,
            digest=environment.digest(data),
            classes=data.classes,
            class_names=environment.class_names,
            test_samples=len(data.y_test),
            rounds=environment.rounds,
            clients_per_round=environment.clients_per_round,
            clients=tuple(
                ClientRecord(
                    key=client.key,
                    samples=size,
                    label_counts=tuple(counts.tolist()),
                    epochs=client.epochs,
                    participation_probability=client.participation_probability,
                )
                for client, size, counts in zip(environment.clients, data.sizes, data.label_counts, strict=True)
            ),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(client.key for client in self.clients)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each client's part of all samples: what it counts by its size."""
        total = sum(client.samples for client in self.clients)
        return tuple(client.samples / total for client in self.clients)
