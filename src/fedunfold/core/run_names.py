"""Names of runs, which stand for all of a run's randomness, its initial model's too (`core.rng`)."""

import secrets

BYTES = 8


def fresh_run(name: str) -> str:
    """The name of a run that was never made before and that nobody can foresee.

    Two runs of one name have the same initial model, minibatches and so the same updates. Under secure aggregation
    these must not enter two sums with different weights, from which single ones could be worked out.

    Args:
        name: What the name begins with.

    >>> fresh_run("trial-0") == fresh_run("trial-0")
    False
    """
    return f"{name}-{secrets.token_hex(BYTES)}"
