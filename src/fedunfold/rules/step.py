"""A round of any server: NumPy arrays in, the global update out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.example_counts import cap_examples
from fedunfold.core.messages import ClientMetrics, ClientUpdates, Metric, OpenUpdates
from fedunfold.core.parts import RoundDecision, RoundInfo
from fedunfold.rules.parametric import ParametricRule
from fedunfold.rules.rule import WeightingRule, decide, requested_metrics

Arrays = Sequence[ArrayLike] | NDArray[Any]


def step(
    rule: WeightingRule,
    updates: Sequence[Arrays] | NDArray[Any],
    num_examples: Sequence[float],
    state: dict[str, Any] | None = None,
    *,
    client_ids: Sequence[str] | None = None,
    num_steps: Sequence[int] | None = None,
    metrics: Mapping[Metric, Sequence[float]] | None = None,
    round: int | None = None,
    max_examples_ratio: float | None = None,
) -> tuple[list[NDArray[Any]], RoundDecision, dict[str, Any]]:
    """What a rule makes of a round's updates, for a server that has nothing else of this package.

        u = s Σ_k Θ_k Δ_k + β u of the round before,      Δ_k = w_k − w,      next model: w + u

    A pre-trained rule comes with the server optimiser it was learned for, and gives what that makes of u; its state is
    kept with the rest. Such an optimiser is not told w, so its step must not depend on w itself: fedlws is refused, and
    so are rules that read the model, the clients' label counts or, where they have no setting for it, learning rate.

    Only clients whose updates are given enter the round; the others count as in `absent="drop"`. Without any update
    u = 0 and nothing else changes but the number of the round.

    Args:
        rule: Any weighting rule.
        updates: Δ_k of each client: a list of arrays each, or all of them as one array [n, d].
        num_examples: N_k of each.
        state: What was returned for the round before; None in the first. Numbers, strings, arrays, lists and dicts.
        client_ids: Who they are; give them wherever not the same clients come in the same order in every round.
        num_steps: τ_k of each, 0 where it is not known.
        metrics: What clients reported for a rule that reads it, such as their losses.
        round: t, from 0; by default one more than in the state.
        max_examples_ratio: N_k counts up to this many times the median of the others; None believes everybody.

    Returns:
        The global update, u or what the rule's server makes of it, with the shapes and types of a client's arrays;
        what was decided, Θ in the order of the updates; the state.

    Raises:
        InputError: Updates are not alike or not finite, or numbers are missing or impossible.

    >>> from fedunfold.rules import size
    >>> update, decision, state = step(size(), [[np.array([1.0, 0.0])], [np.array([0.0, 4.0])]], [30, 10])
    >>> update[0].tolist(), decision.weights.tolist(), state["round"]
    ([0.75, 1.0], [0.75, 0.25], 0)
    """
    known = {"round": -1, "direction": None, "previous": None, "rule": None} | (state or {})
    t = int(known["round"]) + 1 if round is None else round
    names = tuple(map(str, range(len(updates)) if client_ids is None else client_ids))
    reported: Mapping[Metric, Sequence[float]] = metrics or {}
    own = [("client_ids", names), ("num_examples", num_examples), ("num_steps", num_steps), *reported.items()]
    for field, values in own:
        if values is not None and len(values) != len(updates):
            raise InputError(f"round {t}: {field} has {len(values)} entries for {len(updates)} updates; give one each.")
    if len(set(names)) < len(names):
        raise InputError(f"round {t}: client_ids names a client twice; give an update of each once.")
    if not names:
        return [], RoundDecision(torch.zeros(0, dtype=torch.float64)), known | {"round": t}
    clients = [_arrays(own) for own in updates]
    rows = np.stack([_flat(own, clients[0], name, t) for name, own in zip(names, clients, strict=True)])
    examples = _examples(dict(zip(names, num_examples, strict=True)), max_examples_ratio, t)
    everybody = torch.ones(len(names), dtype=torch.bool)
    report = ClientUpdates(
        round=t,
        client_ids=names,
        num_examples=examples,
        participated=everybody,
        num_steps=torch.tensor([0] * len(names) if num_steps is None else list(num_steps)),
        updates=OpenUpdates(torch.arange(len(names)), torch.from_numpy(rows)),
        previous=_tensors(known["previous"]),
        metrics=_metrics(rule, reported, rows, t),
    )
    if known["previous"] is not None and len(known["previous"]) != rows.shape[1]:
        raise InputError(f"round {t}: updates have another size than those that the state is of; start without it.")
    decision, remembered = decide(rule, report, _tensors(known["rule"]))
    if decision.scale != 1:
        raise InputError(f"round {t}: rule '{rule.name}' scales the model, which step is not told; take another rule.")
    mean = decision.weights.numpy() @ rows
    direction = decision.step * mean
    if decision.momentum and known["direction"] is not None:
        direction = direction + decision.momentum * known["direction"]
    update, optimizer = _by_server(rule, direction, report, decision, known.get("server"))
    after = {"round": t, "direction": direction, "previous": mean}
    after |= {"rule": _without_tensors(remembered), "server": optimizer}
    return _split(update, clients[0]), replace(decision, weights=decision.weights.clone()), after


def _by_server(
    rule: WeightingRule, direction: NDArray[np.float64], report: ClientUpdates, decision: RoundDecision, state: Any
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """The step that the rule's server optimiser makes along u, if the rule has one, and the optimiser's state."""
    if not (isinstance(rule, ParametricRule) and rule.algorithm is not None):
        return direction, []
    server, u = rule.algorithm.server, torch.from_numpy(direction)
    origin = torch.zeros_like(u)
    norms = report.entering.rows.norm(dim=1)
    info = RoundInfo(report.round, report.layout, decision.weights, norms, report.num_examples, report.num_steps)
    before = tuple(_tensors(state)) if state else server.init(origin)
    moved, after = server.trusted_update(origin, u, before, info, decision.trust)
    return moved.numpy(), [part.numpy() for part in after]


def _arrays(own: Arrays) -> list[NDArray[Any]]:
    return [own] if isinstance(own, np.ndarray) else [np.asarray(part) for part in own]


def _flat(own: list[NDArray[Any]], first: list[NDArray[Any]], name: str, t: int) -> NDArray[np.float64]:
    """A client's arrays as one row, once they are like the first client's."""
    if [part.shape for part in own] != [part.shape for part in first]:
        raise InputError(f"round {t}: the update of client {name} has other shapes than the first one; leave it out.")
    if not all(np.issubdtype(part.dtype, np.floating) for part in own):
        raise InputError(f"round {t}: the update of client {name} has arrays that are not of floats; leave those out.")
    row = np.concatenate([part.ravel() for part in own]).astype(np.float64)
    if not math.isfinite(float(np.linalg.norm(row))):
        raise InputError(f"round {t}: the update of client {name} has values that are not finite; leave it out.")
    return row


def _examples(given: dict[str, float], ratio: float | None, t: int) -> Tensor:
    for name, count in given.items():
        if not 0 <= count < math.inf:
            raise InputError(f"round {t}: client {name} has num_examples {count!r}; give a finite number >= 0.")
    if ratio is not None:
        if not 1 <= ratio < math.inf:
            raise InputError(f"step needs a finite max_examples_ratio >= 1, not {ratio}.")
        given = cap_examples(given, given, ratio)
    if not sum(given.values()):
        raise InputError(f"round {t}: num_examples are all 0; give what each client trained on.")
    return torch.tensor(list(given.values()))


def _metrics(
    rule: WeightingRule, given: Mapping[Metric, Sequence[float]], rows: NDArray[np.float64], t: int
) -> ClientMetrics:
    """What the rule reads; sums of gradients are −Δ up to the learning rate, which all clients share."""
    if missing := sorted(rule.required_metrics - {"gradients", "norm"} - set(given)):
        raise InputError(f"round {t}: rule '{rule.name}' needs metrics with '{missing[0]}' of every client.")
    read = requested_metrics(rule)
    found = {name: torch.tensor(list(values)).double() for name, values in given.items() if name in read}
    updates = torch.from_numpy(rows)
    if "norm" in read:
        found["norm"] = updates.norm(dim=1)
    return ClientMetrics(**found, gradients=-updates if "gradients" in read else None)


def _split(direction: NDArray[np.float64], like: list[NDArray[Any]]) -> list[NDArray[Any]]:
    ends = np.cumsum([part.size for part in like])
    pieces = np.split(direction, ends[:-1])
    return [piece.reshape(part.shape).astype(part.dtype) for piece, part in zip(pieces, like, strict=True)]


def _without_tensors(value: Any) -> Any:
    """The same with arrays in the place of tensors."""
    if isinstance(value, Tensor):
        return value.numpy(force=True)
    if isinstance(value, Mapping):
        return {key: _without_tensors(entry) for key, entry in value.items()}
    return [_without_tensors(entry) for entry in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Any:
    """The same with tensors in the place of arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _tensors(entry) for key, entry in value.items()}
    return [_tensors(entry) for entry in value] if isinstance(value, list | tuple) else value
