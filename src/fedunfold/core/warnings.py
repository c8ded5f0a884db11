"""What is odd about a run or a weight-learning run that ended all the same: a line each, with what to do.

Rounds are counted from 1 here, as people count. What cannot continue is a `DivergenceError` instead.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedunfold.aggregation.screening import RejectedUpdate

IN_A_ROW = 3  # rounds without anybody are bad luck up to here
COLLAPSED = 0.99  # of a round's weight on one client
FEW = 12  # rounds or clients that are listed one by one


def of_run(present: Tensor, entering: Tensor, rejected: Sequence[RejectedUpdate], needed: int) -> tuple[str, ...]:
    """From who participated [T, K], whose updates entered each round [T, K], and how many a step needs."""
    found = [*_rejections(rejected, len(present))]
    if empty := _longest(~present.any(1)):
        first, last = empty
        found.append(
            f"nobody participated in rounds {first} to {last} of {len(present)}; raise the clients' participation "
            'probability or the number sampled, or let the server remember (`absent="remember"`).'
        )
    if short := _rounds(entering.sum(1) < needed):
        found.append(
            f"there was no step in {_listed('round', short)}, with fewer than the {needed} updates that the "
            'aggregation needs; expect fewer bad clients, or let the server remember (`absent="remember"`).'
        )
    return tuple(found)


def of_learning(
    keys: Sequence[str], weights: Tensor, slopes: Tensor, least: float, rejected: Tensor, rounds: int
) -> tuple[str, ...]:
    """From Θ[T, K], the size of the last gradients [T, K], below which `least` they move nothing, and in how many of
    so many `rounds` of the learning each client was rejected [K]."""
    found = [
        f"while learning, client {key} was rejected in {int(times)} of {rounds} rounds; run with these weights to "
        "see why, and fix or leave out the client."
        for key, times in zip(keys, rejected.tolist(), strict=True)
        if times
    ]
    if len(keys) == 1:
        return tuple(found)
    most, heaviest = weights.max(1)
    for k in sorted(set(heaviest[most > COLLAPSED].tolist())):
        alone = _rounds((heaviest == k) & (most > COLLAPSED))
        found.append(
            f"client {keys[k]} has more than {100 * COLLAPSED:.0f} % of the weight in {_listed('round', alone)}: there "
            "the others hardly count; hold the weights nearer to the sizes with `kl_weight=0.1` where that is not wanted."
        )
    if still := _rounds(slopes.max(1).values <= least):
        found.append(
            f"the gradient of the weights vanished in {_listed('round', still)}, which stayed as they were; learn with "
            "`dtype=torch.float64`, or let rounds share their weights (`tie_rounds`)."
        )
    return tuple(found)


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
    """The longest stretch of marked rounds, where it is longer than bad luck."""
    best, begun = (0, -1), None
    for t, mark in enumerate([*marked.tolist(), False]):
        begun = (t if begun is None else begun) if mark else None
        if begun is not None and t - begun > best[1] - best[0]:
            best = (begun, t)
    return (best[0] + 1, best[1] + 1) if best[1] - best[0] + 1 > IN_A_ROW else None


def _listed(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > FEW:
        return f"{len(numbers)} {what}s from {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
