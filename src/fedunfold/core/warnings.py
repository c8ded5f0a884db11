"""What is odd about a run or a weight-learning run that finished all the same: a line each, with what to do.

Rounds are counted from 1 here, as tables and figures show them. What cannot continue is a `DivergenceError` instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedunfold.core.outcomes import RejectedUpdate

IN_A_ROW = 3  # rounds without participants are bad luck up to here
COLLAPSED = 0.99  # of a round's weight on one client
FEW = 12  # rounds or clients that are listed one by one
WORST = 3  # features that are named


def of_run(
    participated: Tensor, entering: Tensor, rejected: Sequence[RejectedUpdate], min_updates: int
) -> tuple[str, ...]:
    """Warnings about a run.

    Args:
        participated: Who participated, [T, K].
        entering: Whose updates entered each round, [T, K].
        rejected: Whose updates were rejected.
        min_updates: How many updates a step needs.
    """
    found = [*_rejections(rejected, len(participated))]
    if empty := _longest(~participated.any(1)):
        first, last = empty
        found.append(
            f"nobody participated in rounds {first} to {last} of {len(participated)}; raise the clients' participation "
            "probability or the clients per round, or let the server remember absent clients."
        )
    if short := _rounds(entering.sum(1) < min_updates):
        found.append(
            f"there was no step in {_listed('round', short)}, with fewer than the {min_updates} updates that the "
            "aggregator needs; expect fewer bad clients, or let the server remember absent clients."
        )
    return tuple(found)


def of_learning(
    client_ids: Sequence[str], weights: Tensor, slopes: Tensor, least: float, rejections: Tensor, rounds: int
) -> tuple[str, ...]:
    """Warnings about a weight-learning run.

    Args:
        client_ids: The clients.
        weights: Θ, [T, K].
        slopes: The size of the last gradients, [T, K].
        least: Below this a gradient moves nothing.
        rejections: In how many rounds each client was rejected, [K].
        rounds: How many rounds there were in all.
    """
    found = [
        f"while learning, client {key} was rejected in {int(times)} of {rounds} rounds; run with these weights to "
        "see why, and fix or leave out the client."
        for key, times in zip(client_ids, rejections.tolist(), strict=True)
        if times
    ]
    if len(client_ids) == 1:
        return tuple(found)
    most, heaviest = weights.max(1)
    for k in sorted(set(heaviest[most > COLLAPSED].tolist())):
        alone = _rounds((heaviest == k) & (most > COLLAPSED))
        found.append(
            f"client {client_ids[k]} has more than {100 * COLLAPSED:.0f} % of the weight in "
            f"{_listed('round', alone)}: there the others hardly count; keep the weights nearer to the sizes with "
            "kl_weight=0.1 where that is not wanted."
        )
    if still := _rounds(slopes.max(1).values <= least):
        found.append(
            f"the gradient of the weights vanished in {_listed('round', still)}, which stayed as they were; learn "
            "in float64, or let rounds share their weights (tie_rounds)."
        )
    return tuple(found)


def of_ranges(met: Mapping[str, tuple[float, float, float]], rounds: Sequence[Sequence[int]]) -> str:
    """A warning about features that a pre-trained rule was not learned for.

    Args:
        met: By the feature, the worst first: the value farthest out, and the range it was learned on.
        rounds: In which rounds each was out of range, from 1.
    """
    named = [
        f"'{name}' was {value:.3g} (learned on {lowest:.3g} to {highest:.3g}) in {_listed('round', when)}"
        for (name, (value, lowest, highest)), when in zip(met.items(), rounds, strict=True)
    ]
    more = f"; {len(named) - WORST} more features" if len(named) > WORST else ""
    return (
        f"the federation is unlike those that the rule was learned on: {'; '.join(named[:WORST])}{more}. There it "
        "leaned towards weights by size; compare it with fedavg before you rely on it."
    )


def _rejections(entries: Iterable[RejectedUpdate], rounds: int) -> Iterable[str]:
    by_client: dict[str, list[RejectedUpdate]] = {}
    for entry in entries:
        by_client.setdefault(entry.client, []).append(entry)
    for client, own in by_client.items():
        when = _listed("round", [entry.round + 1 for entry in own])
        yield f"client {client} was rejected in {when} of {rounds}: it {own[-1].reason}."


def _rounds(marked: Tensor) -> list[int]:
    return [t + 1 for t in torch.nonzero(marked).flatten().tolist()]


def _longest(marked: Tensor) -> tuple[int, int] | None:
    """The longest run of marked rounds, where it is longer than bad luck."""
    runs = [list(rounds) for mark, rounds in groupby(range(len(marked)), marked.tolist().__getitem__) if mark]
    longest = max(runs, key=len, default=[])
    return (longest[0] + 1, longest[-1] + 1) if len(longest) > IN_A_ROW else None


def _listed(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > FEW:
        return f"{len(numbers)} {what}s from {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
