"""An environment file for own data: settings that suit their size, and comments for whoever edits it next."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w


@dataclass(frozen=True)
class Training:
    """How clients train, as far as it is the same for all."""

    rounds: int
    batch_size: int
    lr: float
    hidden: tuple[int, ...]
    epochs: int


def suggested(sizes: Sequence[int], features: int) -> Training:
    """A start, as in the bundled environments: ten rounds of two epochs, steps of 0.05, one hidden layer.

    The batch is the largest power of two that leaves the median client ten steps an epoch, from 4 to 64; the layer
    has 32 units, and 64 where there are more than 256 features.

    >>> suggested([100, 300, 90], 12)
    Training(rounds=10, batch_size=8, lr=0.05, hidden=(32,), epochs=2)
    """
    steps = max(1, int(statistics.median(sizes)) // 10)
    batch = min(64, max(4, 1 << (steps.bit_length() - 1)))
    return Training(rounds=10, batch_size=batch, lr=0.05, hidden=(32,) if features <= 256 else (64,), epochs=2)


@dataclass(frozen=True)
class Draft:
    """What goes into the file; epochs and reliability are those of single clients, where they differ."""

    name: str
    description: str
    data: str
    partition: Mapping[str, Any]
    clients: Sequence[str]
    training: Training
    epochs: Mapping[str, int]
    participation_probability: Mapping[str, float]
    class_names: Sequence[str] | None = None
    seed: int = 0

    def to_toml(self) -> str:
        training = self.training
        named = (
            []
            if self.class_names is None
            else [_said("the classes by number: the first is 0", class_names=list(self.class_names))]
        )
        parts = [
            "# Made from imported data. Change what you like; an error names what does not fit.",
            _said(name=self.name, description=self.description),
            _said("rounds of training: all clients train, then the server averages", rounds=training.rounds),
            _said("samples in a local step; a client with fewer takes what it has", batch_size=training.batch_size),
            _said("local learning rate: halve it if the loss jumps or diverges", lr=training.lr),
            _said("randomness of training; who holds which data does not change", seed=self.seed),
            *named,
            "# hidden layers of the classifier by width; an empty list makes it linear\n"
            + tomli_w.dumps({"model": {"kind": "mlp", "hidden": list(training.hidden)}}),
            "# a relative path counts from this file\n" + tomli_w.dumps({"data": {"source": "npz", "path": self.data}}),
            "# who holds which rows\n" + tomli_w.dumps({"partition": dict(self.partition)}),
            "# epochs: passes over its own data that a client makes each round\n"
            "# reliability: how likely it is there in a round, from 0 to 1\n"
            + "\n".join(self._client(key) for key in self.clients),
        ]
        return "\n".join(part.rstrip("\n") + "\n" for part in parts)

    def _client(self, key: str) -> str:
        epochs, participation_probability = (
            self.epochs.get(key, self.training.epochs),
            self.participation_probability.get(key, 1.0),
        )
        return "[[clients]]\n" + tomli_w.dumps(
            {"key": key, "epochs": epochs, "participation_probability": participation_probability}
        )


def _said(comment: str = "", **entries: Any) -> str:
    return (f"# {comment}\n" if comment else "") + tomli_w.dumps(entries)
