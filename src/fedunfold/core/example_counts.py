"""What clients say about how many examples they have, which nobody can check."""

from collections.abc import Collection, Mapping
from statistics import median


def cap_examples(num_examples: Mapping[str, float], present: Collection[str], ratio: float) -> dict[str, float]:
    """N_k capped, so that a client cannot outweigh the others by reporting more samples than it has.

        N_k ← min(N_k, ratio · median of the others' N)        over the others that have any

    Args:
        num_examples: N_k of all clients.
        present: Whose updates enter the round; theirs are capped, and the others of them are compared with.
        ratio: How many times the median is allowed.

    >>> cap_examples({"a": 100, "b": 120, "c": 9000}, ["a", "b", "c"], 10)
    {'a': 100, 'b': 120, 'c': 1100.0}
    >>> cap_examples({"a": 100, "b": 0, "c": 0}, ["a", "b", "c"], 10)
    {'a': 100, 'b': 0, 'c': 0}
    """
    capped = dict(num_examples)
    for client_id in present:
        others = [num_examples[other] for other in present if other != client_id and num_examples[other] > 0]
        if others:
            capped[client_id] = min(num_examples[client_id], ratio * median(others))
    return capped
