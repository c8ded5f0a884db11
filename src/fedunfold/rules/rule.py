"""What a weighting rule is, and how a function becomes one.

A rule is a pure function with its state passed through: `(report, state) -> (weights, state)`. The state of
the first round is None; what a rule stores in it is its own affair. `required_metrics` names what the clients have to
compute for the rule, and only that is requested of them. A rule may also have `optional_metrics`, which it can do
without: they are requested too, and NaN for a client that does not report them, as an ordinary Flower client. In the
place of weights it may return a `RoundDecision` with a step size, a momentum and more. What else it reads than what
clients report of their training, it names in `uses`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.params import fingerprint
from fedunfold.core.parts import RoundDecision
from fedunfold.core.registry import Registry

State = Any
Decided = Tensor | RoundDecision
Uses = Literal["server data", "label counts"]
"""What a rule reads that others do without: rows that the server holds, how many samples of a class each client has."""
Weigh = Callable[[ClientUpdates, State], tuple[Decided, State]]

SUM_TOLERANCE = 1e-6  # what single-precision weights from a file may miss 1 by


@runtime_checkable
class WeightingRule(Protocol):
    """What the loop over rounds needs of a rule."""

    @property
    def name(self) -> str: ...

    @property
    def required_metrics(self) -> frozenset[Metric]: ...

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Decided, State]: ...


RULES: Registry[WeightingRule] = Registry("rule", "fedunfold.rules", "fedunfold.rules")


@dataclass(frozen=True)
class Rule:
    """A named weighting function whose answers are checked: Θ_k ≥ 0 and Σ_k Θ_k = 1.

    Attributes:
        name: What it is called in tables.
        weigh: The function.
        required_metrics: What clients have to report for it.
        optional_metrics: What it reads where clients report it; NaN where they do not.
        uses: What else it reads, which not every federation has or discloses.
        numbers_only: Whether it decides on weights alone, by counts and what clients report: by no update, nor any sum
            of them. Then a server need keep none.
        client_ids: Whom it has weights for, in this order, where it is for certain clients alone.
    """

    name: str
    weigh: Weigh = field(repr=False)
    required_metrics: frozenset[Metric] = frozenset()
    optional_metrics: frozenset[Metric] = frozenset()
    uses: frozenset[Uses] = frozenset()
    numbers_only: bool = False
    client_ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_metrics(self.name, requested_metrics(self))

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Decided, State]:
        """Θ^(t) as a float64 CPU tensor [K], alone or in a `RoundDecision`, and the state for the next round."""
        where = f"weighting rule '{self.name}' in round {report.round}"
        if "server data" in self.uses and report.server_data is None:
            raise no_server_data(self.name)
        answer: object = self.weigh(report, state)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise InputError(f"{where} must return (weights, state), not {type(answer).__name__}.")
        decided, state = answer
        if not isinstance(decided, RoundDecision):
            return _checked_weights(decided, report, where), state
        within = 0 <= decided.momentum < 1 and 0 <= decided.trust <= 1
        if not (math.isfinite(decided.step) and decided.step >= 0 and within):
            raise InputError(
                f"{where} must decide on a finite step >= 0, a momentum of at least 0 and below 1 and a trust from 0 "
                f"to 1, not {decided.step}, {decided.momentum} and {decided.trust}."
            )
        if not 0 < decided.scale < math.inf:
            raise InputError(f"{where} must decide on a finite scale > 0, not {decided.scale}.")
        weights = _checked_weights(decided.weights, report, where)
        numbers = decided.step, decided.momentum, decided.trust, decided.scale
        return RoundDecision(weights, *map(float, numbers)), state


def requested_metrics(rule: WeightingRule) -> frozenset[Metric]:
    """What is requested of clients for a rule: what it requires, and what it reads where there is any.

    >>> from fedunfold.rules import dr
    >>> sorted(requested_metrics(dr()))
    ['loss']
    """
    return rule.required_metrics | frozenset[Metric](getattr(rule, "optional_metrics", ()))


def uses_of(rule: WeightingRule) -> frozenset[Uses]:
    """What a rule reads that others do without; nothing where it does not say.

    >>> from fedunfold.rules import fedlaw, size
    >>> sorted(uses_of(fedlaw())), sorted(uses_of(size()))
    (['server data'], [])
    """
    return frozenset[Uses](getattr(rule, "uses", ()))


def no_server_data(name: str) -> InputError:
    """Why a rule that reads rows of the server cannot be used."""
    return InputError(
        f"rule '{name}' reads data of the server, and the server has none here; give the environment server_rows, or "
        "server_data where it is made of arrays or data sets."
    )


def decide(rule: WeightingRule, report: ClientUpdates, state: State) -> tuple[RoundDecision, State]:
    """What a rule decides for a round, also where it returns weights alone."""
    decided, remembered = rule(report, state)
    return decided if isinstance(decided, RoundDecision) else RoundDecision(decided), remembered


def for_rounds(rule: WeightingRule, rounds: int) -> WeightingRule:
    """The rule for a run of T rounds: one that has `with_horizon` is told T."""
    told: Callable[[int], WeightingRule] | None = getattr(rule, "with_horizon", None)
    return rule if told is None else told(rounds)


def remarks_of(rule: WeightingRule, state: State) -> tuple[str, ...]:
    """What a rule says, a line each, about a run that ended in this state: one that has `remarks` is asked."""
    asked: Callable[[State], tuple[str, ...]] | None = getattr(rule, "remarks", None)
    return () if asked is None else asked(state)


def renamed(rule: WeightingRule, state: State, before: str, after: str) -> State:
    """The state where a client turns out to have another id: a rule that has `renamed` is told."""
    told: Callable[[State, str, str], State] | None = getattr(rule, "renamed", None)
    return state if told is None else told(state, before, after)


def describe_rule(rule: WeightingRule) -> dict[str, Any]:
    """What a checkpoint says of the rule it belongs to: its name, and fingerprints of its weights, or of its parameters
    and the ranges in which it decides by them.

    >>> from fedunfold.rules import size
    >>> describe_rule(size())
    {'rule': 'size', 'weights': None, 'parameters': None}
    """
    weights, params = getattr(rule, "weights", None), getattr(rule, "params", None)
    named = sorted(params.items()) if isinstance(params, Mapping) else []
    named += [("ranges", getattr(rule, "ranges", None))]
    vectors = [value.flatten().double() for _, value in named if isinstance(value, Tensor)]
    return {
        "rule": rule.name,
        "weights": fingerprint(weights) if isinstance(weights, Tensor) else None,
        "parameters": fingerprint(torch.cat(vectors)) if vectors else None,
    }


def _checked_weights(given: object, report: ClientUpdates, where: str) -> Tensor:
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} must return numbers as its weights: {error}.") from error
    if weights.shape != (len(report.client_ids),):
        raise InputError(
            f"{where} must return one weight for each of the {len(report.client_ids)} clients,"
            f" not a tensor of shape {list(weights.shape)}."
        )
    if problem := simplex_violation(weights, report.client_ids):
        raise InputError(f"{where} {problem}.")
    return weights


def simplex_violation(weights: Tensor, names: Iterable[str]) -> str | None:
    """What keeps Θ[K] from being weights (finite, ≥ 0, summing to 1), or None."""
    for name, weight in zip(names, weights.tolist(), strict=True):
        if not 0 <= weight < float("inf"):
            return f"gives '{name}' the weight {weight:g}, where a finite number >= 0 is needed"
    total = float(weights.sum())
    if abs(total - 1) > SUM_TOLERANCE:
        return f"gives weights that sum to {total:.9g} instead of 1"
    return None


def rule(*required_metrics: Metric, optional: Iterable[Metric] = ()) -> Callable[[Weigh], Rule]:
    """Make a weighting rule of a function.

    The function gets a round's `ClientUpdates` and its own state (None at first), and returns Θ for all clients and
    the next state.

    Args:
        *required_metrics: What clients have to report. `loss`: the sum of the minibatch losses each client met;
            `start_loss`: its mean loss at w^(t); `accuracy`: its own model's, on its own training data; `gradients`:
            its sum of local gradients.
        optional: What it reads where clients report it, and does without where they do not (NaN).

    >>> import torch
    >>> from fedunfold.core.messages import ClientMetrics, ClientUpdates
    >>> @rule("loss")
    ... def worst_only(report, state):
    ...     loss = report.metrics.loss.nan_to_num(0)
    ...     return (loss == loss.max()) / (loss == loss.max()).sum(), state
    >>> report = ClientUpdates(
    ...     round=0, client_ids=("ann", "bob"), num_examples=torch.tensor([30, 10]),
    ...     participated=torch.tensor([True, True]), num_steps=torch.tensor([3, 1]),
    ...     metrics=ClientMetrics(loss=torch.tensor([1.5, 2.0])))
    >>> worst_only(report, None)[0].tolist()
    [0.0, 1.0]
    """
    return lambda function: Rule(function.__name__, function, frozenset(required_metrics), frozenset(optional))


def as_rule(thing: WeightingRule | Weigh) -> WeightingRule:
    """A rule as it is, or a function `(report, state) -> (weights, state)` made one.

    A function may name what it reads in attributes `required_metrics` and `optional_metrics`, as `rule` does for it.
    """
    name = str(getattr(thing, "name", getattr(thing, "__name__", type(thing).__name__)))
    if isinstance(thing, WeightingRule):
        _check_metrics(name, requested_metrics(thing))
        return thing
    if not (callable(thing) and _takes_report_and_state(thing)):
        raise InputError(
            f"'{name}' is no weighting rule; give one such as size(), with its parentheses,"
            " or a function (report, state) -> (weights, state)."
        )
    return Rule(name, thing, _declared(thing, "required_metrics"), _declared(thing, "optional_metrics"))


def _declared(function: Weigh, attribute: str) -> frozenset[Any]:
    declared: Any = getattr(function, attribute, ())
    return frozenset([declared] if isinstance(declared, str) else declared)


def _takes_report_and_state(function: Callable[..., object]) -> bool:
    """Checked before the first round, because by then a wrong argument costs a round of training."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _check_metrics(name: str, metrics: Iterable[object]) -> None:
    for metric in metrics:
        if metric not in get_args(Metric):
            raise InputError(
                f"weighting rule '{name}' needs '{metric}', which clients cannot report;"
                f" choose among {', '.join(get_args(Metric))}."
            )
