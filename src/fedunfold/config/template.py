"""An environment file for custom data: settings that suit their size, and comments for whoever edits it next."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w


@dataclass(frozen=True)
class Training:
    """How clients train, as far as it is the same for all.

    Attributes:
        rounds: Rounds of training.
        batch_size: Samples in a local step.
        lr: The local learning rate.
        hidden: Widths of the model's hidden layers.
        epochs: Epochs of local training in a round.
    """

    rounds: int
    batch_size: int
    lr: float
    hidden: tuple[int, ...]
    epochs: int


def suggest_training(sizes: Sequence[int], features: int) -> Training:
    """A start, as in the bundled environments: ten rounds of two epochs, steps of 0.05, one hidden layer.

    The batch is the largest power of two that leaves the median client ten steps an epoch, from 4 to 64; the layer
    has 32 units, and 64 where there are more than 256 features.

    Args:
        sizes: Samples of each client.
        features: Features of a sample.

    Returns:
        The settings.

    >>> suggest_training([100, 300, 90], 12)
    Training(rounds=10, batch_size=8, lr=0.05, hidden=(32,), epochs=2)
    """
    steps = max(1, int(statistics.median(sizes)) // 10)
    batch = min(64, max(4, 1 << (steps.bit_length() - 1)))
    return Training(rounds=10, batch_size=batch, lr=0.05, hidden=(32,) if features <= 256 else (64,), epochs=2)


@dataclass(frozen=True)
class Draft:
    """What goes into the file.

    Attributes:
        name: What the environment is called.
        description: What it is, for people.
        data: The path of the .npz, relative to the file.
        partition: Who holds which rows.
        clients: Their keys.
        training: How they train.
        epochs: Epochs of single clients, where they differ.
        participation_probability: Likewise.
        class_names: The classes, where they have names.
        seed: Randomness of training.
    """

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
        """The file's text, a comment above each setting."""
        training = self.training
        names = {} if self.class_names is None else {"class_names": list(self.class_names)}
        model = {"kind": "mlp", "hidden": list(training.hidden)}
        parts: list[tuple[str, Mapping[str, Any]]] = [
            ("Change what you like: what does not fit is named when the file is read.", {}),
            ("", {"name": self.name, "description": self.description}),
            ("rounds of training: all clients train, then the server averages", {"rounds": training.rounds}),
            ("samples in a local step; a client with fewer takes what it has", {"batch_size": training.batch_size}),
            ("local learning rate: halve it if the loss jumps or diverges", {"lr": training.lr}),
            ("randomness of training; who holds which data does not change", {"seed": self.seed}),
            *([("the classes by number: the first is 0", names)] if names else []),
            ("hidden layers of the classifier by width; an empty list makes it linear", {"model": model}),
            ("a relative path counts from this file", {"data": {"source": "npz", "path": self.data}}),
            ("who holds which rows", {"partition": dict(self.partition)}),
            (
                "epochs: passes over its own data that a client makes each round\n"
                "# participation_probability: how likely it takes part in a round, from 0 to 1",
                {},
            ),
        ]
        commented = [(f"# {comment}\n" if comment else "") + tomli_w.dumps(entries) for comment, entries in parts]
        return "\n".join(commented) + "\n".join(map(self._client, self.clients))

    def _client(self, key: str) -> str:
        settings = {
            "key": key,
            "epochs": self.epochs.get(key, self.training.epochs),
            "participation_probability": self.participation_probability.get(key, 1.0),
        }
        return "[[clients]]\n" + tomli_w.dumps(settings)
