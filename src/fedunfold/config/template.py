"""An environment file for custom data: settings that suit their size, and comments for whoever edits it next."""

import statistics
from collections.abc import Sequence
from typing import Any

import tomli_w

from fedunfold.config.schema import Environment

# What goes into the file, with the comment above it.
COMMENTS = {
    "name": "Change what you like: what does not fit is named when the file is read.",
    "description": "",
    "rounds": "rounds of training: all clients train, then the server averages",
    "batch_size": "samples in a local step; a client with fewer takes what it has",
    "lr": "local learning rate: halve it if the loss jumps or diverges",
    "seed": "randomness of training; who holds which data does not change",
    "clock": "how long clients take in simulated time",
    "class_names": "the classes by number: the first is 0",
    "task": "what a model is trained for",
    "model": "hidden layers of the classifier by width; an empty list makes it linear",
    "data": "a relative path counts from this file",
    "partition": "who holds which rows",
    "clients": "epochs: passes over its own data that a client makes each round\n"
    "# participation_probability: how likely it takes part in a round, from 0 to 1",
}


def suggest_training(sizes: Sequence[int], features: int) -> dict[str, Any]:
    """A start, as in the bundled environments: ten rounds of two epochs, steps of 0.05, one hidden layer.

    The batch is the largest power of two that leaves the median client ten steps an epoch, from 4 to 64; the layer
    has 32 units, and 64 where there are more than 256 features.

    Args:
        sizes: Samples of each client.
        features: Features of a sample.

    Returns:
        Rounds, batch size, learning rate, epochs and the widths of hidden layers.

    >>> suggest_training([100, 300, 90], 12)
    {'rounds': 10, 'batch_size': 8, 'lr': 0.05, 'epochs': 2, 'hidden': (32,)}
    """
    steps = max(1, int(statistics.median(sizes)) // 10)
    batch = min(64, max(4, 1 << (steps.bit_length() - 1)))
    hidden = (32,) if features <= 256 else (64,)
    return {"rounds": 10, "batch_size": batch, "lr": 0.05, "epochs": 2, "hidden": hidden}


def to_commented_toml(env: Environment) -> str:
    """Write an environment for people: its main settings, each with a comment.

    Args:
        env: The environment.

    Returns:
        The text of a TOML file.
    """
    content = env.model_dump(mode="json", exclude_none=True)
    parts = []
    for name, comment in COMMENTS.items():
        if name in content:
            tables = content[name] if name == "clients" else []
            text = "\n".join("[[clients]]\n" + tomli_w.dumps(table) for table in tables)
            parts.append((f"# {comment}\n" if comment else "") + (text or tomli_w.dumps({name: content[name]})))
    return "\n".join(parts)
