"""What a weighting rule is, and how a function becomes one.

A rule is a pure function with its state passed through: `(report, state) -> (weights, state)`. The state of
the first round is None; what a rule keeps in it is its own affair. `needs` names what the clients have to
compute for the rule, and only that is asked of them.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.federation import ClientUpdates, Need

State = Any
Weigh = Callable[[ClientUpdates, State], tuple[Tensor, State]]

SUM_TOLERANCE = 1e-6  # what single-precision weights from a file may miss 1 by


@runtime_checkable
class WeightingRule(Protocol):
    """What the loop over rounds asks of a rule."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[Need]: ...

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class Rule:
    """A named weighting function whose answers are checked: Θ_k ≥ 0 and Σ_k Θ_k = 1."""

    name: str
    weigh: Weigh = field(repr=False)
    needs: frozenset[Need] = frozenset()

    def __post_init__(self) -> None:
        _check_needs(self.name, self.needs)

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        """Θ^(t) as a float64 CPU tensor [K], and the state for the next round."""
        where = f"weighting rule '{self.name}' in round {report.round}"
        answer: object = self.weigh(report, state)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise InputError(f"{where} must return (weights, state), not {type(answer).__name__}.")
        try:
            weights = torch.as_tensor(answer[0], dtype=torch.float64, device="cpu").detach()
        except (TypeError, ValueError) as error:
            raise InputError(f"{where} must return numbers as its weights: {error}.") from error
        if weights.shape != (len(report.keys),):
            raise InputError(
                f"{where} must return one weight for each of the {len(report.keys)} clients,"
                f" not a tensor of shape {list(weights.shape)}."
            )
        if problem := simplex_violation(weights, report.keys):
            raise InputError(f"{where} {problem}.")
        return weights, answer[1]


def simplex_violation(weights: Tensor, names: Iterable[str]) -> str | None:
    """What keeps Θ[K] from being weights (finite, ≥ 0, summing to 1), or None."""
    for name, weight in zip(names, weights.tolist(), strict=True):
        if not 0 <= weight < float("inf"):
            return f"gives '{name}' the weight {weight:g}, where a finite number >= 0 is needed"
    total = float(weights.sum())
    if abs(total - 1) > SUM_TOLERANCE:
        return f"gives weights that sum to {total:.9g} instead of 1"
    return None


def reported(report: ClientUpdates, need: Need) -> Tensor:
    """The part of the report that a rule asked for under this name, on the device it came on."""
    value: Tensor | None = getattr(report, need)
    if value is None:
        raise InputError(
            f"round {report.round} was reported without '{need}'; name it in the needs of the weighting rule."
        )
    return value


def rule(*needs: Need) -> Callable[[Weigh], Rule]:
    """Make a weighting rule of a function; the arguments name what it needs from the clients.

    `loss`: the sum of the minibatch losses each client met; `start_loss`: its mean loss at w^(t); `accuracy`:
    its own model's, on its own training data; `gradients`: its sum of local gradients. The function gets a
    `ClientUpdates` and its own state (None at first), and returns Θ for all clients and the next state.

    >>> import torch
    >>> from fedunfold.core.federation import ClientUpdates
    >>> @rule("loss")
    ... def worst_only(report, state):
    ...     loss = reported(report, "loss").nan_to_num(0)
    ...     return (loss == loss.max()) / (loss == loss.max()).sum(), state
    >>> report = ClientUpdates(
    ...     round=0, keys=("ann", "bob"), sizes=torch.tensor([30, 10]), present=torch.tensor([True, True]),
    ...     steps=torch.tensor([3, 1]), updates=torch.zeros(2, 4), loss=torch.tensor([1.5, 2.0]))
    >>> worst_only(report, None)[0].tolist()
    [0.0, 1.0]
    """
    return lambda function: Rule(function.__name__, function, frozenset(needs))


def as_rule(thing: WeightingRule | Weigh) -> WeightingRule:
    """A rule as it is, or a function `(report, state) -> (weights, state)` made one.

    A function may say what it needs in an attribute `needs`, as `rule` does for it.
    """
    name = str(getattr(thing, "name", getattr(thing, "__name__", type(thing).__name__)))
    if isinstance(thing, WeightingRule):
        _check_needs(name, thing.needs)
        return thing
    if not (callable(thing) and _takes_report_and_state(thing)):
        raise InputError(
            f"'{name}' is no weighting rule; give one such as size(), with its parentheses,"
            " or a function (report, state) -> (weights, state)."
        )
    declared: Any = getattr(thing, "needs", ())
    needs: Iterable[Any] = [declared] if isinstance(declared, str) else declared
    return Rule(name, thing, frozenset(needs))


def _takes_report_and_state(function: Callable[..., object]) -> bool:
    """Told before the first round, because by then a wrong argument costs a round of training."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _check_needs(name: str, needs: Iterable[object]) -> None:
    for need in needs:
        if need not in get_args(Need):
            raise InputError(
                f"weighting rule '{name}' needs '{need}', which clients cannot report;"
                f" choose among {', '.join(get_args(Need))}."
            )
