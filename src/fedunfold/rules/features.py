"""What a rule with parameters reads of a round: a few numbers that have no scale, of each client and of the round.

With m_k the updates that enter round t, p_k = N_k/ΣN over these clients, m̄ = Σ_k p_k m_k, Θ_k the weights of the round
before, ū its direction and ū' that of the one before it. Nothing depends on the model's size, the data's scale or the
number of clients as such:

| of a client | formula                              | needs      |
|-------------|--------------------------------------|------------|
| size        | log(N_k / mean N)                    | counts     |
| steps       | log(τ_k / mean τ)                    | counts     |
| norm        | log(‖m_k‖ / √mean ‖m‖²)              | norms      |
| agreement   | cos(m_k, m̄)                          | products   |
| redundancy  | log Σ_j p_j max(0, cos(m_k, m_j))    | products   |
| persistence | cos(m_k, ū)                          | norms, projection |
| presences   | log((1 + rounds seen) / mean)        | counts     |
| staleness   | log(1 + rounds since last seen)      | counts     |

| of the round | formula                            | needs      |
|--------------|------------------------------------|------------|
| spread       | log(Σ_k p_k ‖m_k‖² / ‖m̄‖²)         | products   |
| turn         | cos(m̄, ū)                          | products, projection |
| growth       | log(‖m̄‖ / ‖m̄ of the round before‖) | products   |
| last_spread  | log(Σ_k Θ_k ‖m_k‖² / ‖ū‖²)         | norms      |
| last_turn    | cos(ū, ū')                         | aggregates |
| last_growth  | log(‖ū‖ / ‖ū'‖)                    | aggregates |
| last_step    | log s of the round before          | counts     |
| unevenness   | log(n ‖ū‖² / ‖ū‖₁²), ū_i ≠ 0: n    | counts     |
| progress     | t/T, or −1 where T is not known    | counts     |
| age          | log(1 + t)                         | counts     |
| clients      | log of how many enter              | counts     |
| effort       | log of the mean number of steps    | counts     |

A client was last seen in the round whose model it trained. So staleness is how many steps ago its update was begun,
both of an update that the server remembers and of one that arrives late in asynchronous rounds.

By its last step size a rule can make the next one longer or shorter than that.
Unevenness is 0 where all coordinates that move at all move equally far. Counts and the aggregate of the round before
are known to every server, earlier ones are where they are kept. Norms are a number that each client
reports, a projection is its inner product with ū: a server of secure sums can have both. Products of all pairs need
the updates themselves. Redundancy is small for a client whose data nobody shares, and needs no label counts. A number
that is not known counts as 0, the mean of a feature of clients, and no mean includes it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.arrays import Array
from fedunfold.rules.measurements import Measurements, Numbers

Need = Literal["norms", "projection", "aggregates", "products"]
Value = TypeVar("Value", Numbers, float)
LARGEST = 6.0
"""No feature is larger: e^6 = 400 is far for a ratio."""


@dataclass(frozen=True)
class Feature(Generic[Value]):
    """A feature, of each client [n] or of the round.

    Attributes:
        read: Its formula.
        needs: What it needs beside counts.
    """

    read: Callable[[Measurements], Value]
    needs: frozenset[Need] = frozenset()


@dataclass(frozen=True)
class RoundFeatures(Generic[Array]):
    """What was read of a round, in tensors or in NumPy arrays.

    Attributes:
        clients: Indices of the clients that enter the round, [n].
        shares: p_k, [n].
        of_clients: The features of each, [n, F].
        of_round: Those of the round, [G].
        state: What the next round needs to know of this one and those before.
        squares: ‖m_k‖², [n], where the next round needs Σ_k Θ_k ‖m_k‖².
    """

    clients: Array
    shares: Array
    of_clients: Array
    of_round: Array
    state: dict[str, Any]
    squares: Array | None = None

    @property
    def bounded(self) -> "RoundFeatures[Array]":
        """What is decided by: no feature is larger than LARGEST."""
        bounded = self.of_clients.clip(-LARGEST, LARGEST), self.of_round.clip(-LARGEST, LARGEST)
        return replace(self, of_clients=bounded[0], of_round=bounded[1])


def _agreement(round_: Measurements) -> Numbers:
    return _ratio(round_.to_mean, round_.norms * round_.mean_norm)


def _redundancy(round_: Measurements) -> Numbers:
    safe = round_.norms.clip(min=1e-30)
    cosines = (round_.products / safe / safe[:, None]).clip(0, 1)
    found: Numbers = np.log((cosines @ round_.shares).clip(min=1e-6))
    return found


def _persistence(round_: Measurements) -> Numbers:
    return _ratio(np.nan_to_num(round_.along), round_.norms * round_.previous_norm)


def _spread(round_: Measurements) -> float:
    return _log_ratio(float(round_.shares @ np.square(round_.norms)), round_.mean_square)


def _turn(round_: Measurements) -> float:
    return _cosine(float(round_.shares @ round_.along), round_.mean_norm * round_.previous_norm)


def _growth(round_: Measurements) -> float:
    return 0.0 if round_.previous is None else _log_ratio(round_.mean_norm, round_.known.get("norm", 0.0))


def _last_step(round_: Measurements) -> float:
    return float(round_.known.get("log_step", 0.0))


def _last_spread(round_: Measurements) -> float:
    return _log_ratio(round_.known.get("square", 0.0), round_.previous_norm**2)


def _last_turn(round_: Measurements) -> float:
    if round_.previous is None or round_.before is None:
        return 0.0
    return _cosine(float(round_.previous @ round_.before), round_.previous_norm * round_.norm_before)


def _last_growth(round_: Measurements) -> float:
    return _log_ratio(round_.previous_norm, round_.norm_before)


def _unevenness(round_: Measurements) -> float:
    if round_.previous is None:
        return 0.0
    length = float(round_.previous.abs().sum())
    return _log_ratio(_moved(round_.previous) * round_.previous_norm**2, length**2)


def _moved(vector: Tensor) -> int:
    """How many entries are not 0."""
    # A mask's are counted in a third of the time of a vector's, where that need not leave the device for it.
    return int(np.count_nonzero(vector.numpy() != 0)) if vector.device.type == "cpu" else int(vector.count_nonzero())


def _progress(round_: Measurements) -> float:
    return -1.0 if round_.horizon is None else min(1.0, round_.report.round / round_.horizon)


def _effort(round_: Measurements) -> float:
    known = round_.steps[round_.steps > 0]
    return math.log(max(1.0, float(known.mean()))) if len(known) else 0.0


_PRODUCTS = frozenset[Need]({"products"})
OF_CLIENTS: dict[str, Feature[Numbers]] = {
    "size": Feature(lambda round_: _relative(round_.sizes)),
    "steps": Feature(lambda round_: _relative(round_.steps)),
    "norm": Feature(lambda round_: _relative(np.square(round_.norms)) / 2, frozenset({"norms"})),
    "agreement": Feature(_agreement, _PRODUCTS),
    "redundancy": Feature(_redundancy, _PRODUCTS),
    "persistence": Feature(_persistence, frozenset({"norms", "projection"})),
    "presences": Feature(lambda round_: _relative(1 + round_.presences)),
    "staleness": Feature(lambda round_: np.log1p(round_.report.round - round_.last_seen)),
}
OF_ROUND: dict[str, Feature[float]] = {
    "spread": Feature(_spread, _PRODUCTS),
    "turn": Feature(_turn, frozenset({"products", "projection"})),
    "growth": Feature(_growth, _PRODUCTS),
    "last_step": Feature(_last_step),
    "last_spread": Feature(_last_spread, frozenset({"norms"})),
    "last_turn": Feature(_last_turn, frozenset({"aggregates"})),
    "last_growth": Feature(_last_growth, frozenset({"aggregates"})),
    "unevenness": Feature(_unevenness),
    "progress": Feature(_progress),
    "age": Feature(lambda round_: math.log1p(round_.report.round)),
    "clients": Feature(lambda round_: math.log(max(1, len(round_.clients)))),
    "effort": Feature(_effort),
}
CLIENT_FEATURES = ("size", "steps", "norm", "agreement", "redundancy", "persistence", "presences", "staleness")
ROUND_FEATURES = ("spread", "turn", "growth", "last_step", "unevenness", "progress", "age", "clients", "effort")
"""What a rule reads that sees single updates."""
PRIVATE_CLIENT_FEATURES = ("size", "steps", "norm", "persistence", "presences", "staleness")
PRIVATE_ROUND_FEATURES = (
    *("last_spread", "last_turn", "last_growth", "last_step", "unevenness"),
    *("progress", "age", "clients", "effort"),
)
"""What a rule reads that works with secure sums: single numbers of clients, and aggregates."""


def needs_of(client_features: Iterable[str], round_features: Iterable[str]) -> frozenset[Need]:
    """What has to be measured for some features.

    >>> sorted(needs_of(PRIVATE_CLIENT_FEATURES, PRIVATE_ROUND_FEATURES))
    ['aggregates', 'norms', 'projection']
    """
    known = (client_features, OF_CLIENTS, "clients"), (round_features, OF_ROUND, "the round")
    found = frozenset[Need]()
    for names, features, whose in known:
        for name in names:
            if name not in features:
                raise InputError(f"there is no feature '{name}' of {whose}; choose among {', '.join(features)}.")
            found |= features[name].needs
    return found


_needs_of = lru_cache(maxsize=64)(needs_of)


def measure_features(
    report: ClientUpdates,
    state: dict[str, Any] | None,
    horizon: int | None,
    client_features: Sequence[str] = CLIENT_FEATURES,
    round_features: Sequence[str] = ROUND_FEATURES,
) -> RoundFeatures[NDArray[Any]]:
    """The features of a round.

    Args:
        report: What clients sent.
        state: What was returned for the round before; None in the first.
        horizon: T, where it is known.
        client_features: Which are wanted of each client.
        round_features: Which are wanted of the round.
    """
    needs = _needs_of(tuple(client_features), tuple(round_features))
    round_ = Measurements(report, state or {}, horizon, "products" in needs)
    of_clients = np.empty((len(round_.clients), len(client_features)))
    for i, name in enumerate(client_features):
        of_clients[:, i] = OF_CLIENTS[name].read(round_)
    of_round = np.array([OF_ROUND[name].read(round_) for name in round_features])
    after: dict[str, Any] = {"seen": round_.seen}
    if "products" in needs:
        after["norm"] = round_.mean_norm
    if "aggregates" in needs and round_.previous is not None:
        after["before"] = round_.previous
    if report.remembered is not None and needs & {"products", "projection"} and round_.sketches is not None:
        after["sketches"] = round_.sketches.state
    squares = np.square(round_.norms) if "last_spread" in round_features else None
    return RoundFeatures(round_.clients, round_.shares, of_clients, of_round, after, squares)


def read_features(
    report: ClientUpdates,
    state: dict[str, Any] | None,
    horizon: int | None,
    client_features: Sequence[str] = CLIENT_FEATURES,
    round_features: Sequence[str] = ROUND_FEATURES,
) -> RoundFeatures[Tensor]:
    """The same in tensors, so that what is decided by them can be differentiated."""
    found = measure_features(report, state, horizon, client_features, round_features)
    return RoundFeatures(
        torch.from_numpy(found.clients),
        torch.from_numpy(found.shares),
        torch.from_numpy(found.of_clients),
        torch.from_numpy(found.of_round),
        found.state,
        None if found.squares is None else torch.from_numpy(found.squares),
    )


def _relative(values: Numbers) -> Numbers:
    """log(x / mean x) with the mean of those that are known, 0 where x is not."""
    known = values > 0
    count = int(np.count_nonzero(known))
    mean = values[known].sum() / count if count else 1.0
    found: Numbers = np.log(values / mean if count == len(values) else np.where(known, values / mean, 1.0))
    return found


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.where(below > 1e-30, above / np.maximum(below, 1e-30), 0.0).clip(-1, 1)


def _cosine(above: float, below: float) -> float:
    return max(-1.0, min(1.0, above / below)) if below > 1e-30 else 0.0


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 else 0.0
