"""What a rule with parameters reads of a round: a few numbers that have no scale, of each client and of the round.

With m_k the updates that enter round t, p_k = N_k/ΣN over these clients, m̄ = Σ_k p_k m_k and ū the direction of the
round before. Nothing depends on the model's size, the data's scale or the number of clients as such:

| of a client | formula                              |   | of the round | formula                          |
|-------------|--------------------------------------|---|--------------|----------------------------------|
| size        | log(N_k / mean N)                    |   | spread       | log(Σ_k p_k ‖m_k‖² / ‖m̄‖²)      |
| steps       | log(τ_k / mean τ)                    |   | turn         | cos(m̄, ū)                        |
| norm        | log(‖m_k‖ / √mean ‖m‖²)              |   | growth       | log(‖m̄‖ / ‖m̄ of the round before‖) |
| agreement   | cos(m_k, m̄)                          |   | progress     | t/T, or −1 where T is not known   |
| redundancy  | log Σ_j p_j max(0, cos(m_k, m_j))    |   | age          | log(1 + t)                        |
| persistence | cos(m_k, ū)                          |   | clients      | log of how many enter            |
| presences   | log((1 + rounds seen) / mean)        |   | effort       | log of the mean number of steps  |
| staleness   | log(1 + rounds since last seen)      |   |              |                                  |

Redundancy is small for a client whose data nobody shares, and needs no label counts. A number that is not known counts
as 0, the mean of a feature of clients.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedunfold.core.messages import ClientUpdates

CLIENT_FEATURES = ("size", "steps", "norm", "agreement", "redundancy", "persistence", "presences", "staleness")
ROUND_FEATURES = ("spread", "turn", "growth", "progress", "age", "clients", "effort")
LARGEST = 6.0
"""No feature is larger: e^6 = 400 is far for a ratio."""


@dataclass(frozen=True)
class RoundFeatures:
    """What was read of a round.

    Attributes:
        clients: Indices of the clients that enter the round, [n].
        shares: p_k, [n].
        of_clients: The features of each, [n, F].
        of_round: Those of the round, [G].
        state: What the next round needs to know of this one and those before.
    """

    clients: Tensor
    shares: Tensor
    of_clients: Tensor
    of_round: Tensor
    state: dict[str, Any]


def read_features(report: ClientUpdates, state: dict[str, Any] | None, horizon: int | None) -> RoundFeatures:
    """The features of a round.

    Args:
        report: What clients sent.
        state: What was returned for the round before; None in the first.
        horizon: T, where it is known.
    """
    known = state or {"seen": {}, "previous": None, "norm": 0.0}
    updates, t = report.entering, report.round
    clients = updates.clients.cpu()
    steps = report.num_steps.cpu().double()
    seen: dict[str, list[float]] = dict(known["seen"])  # client id -> [rounds seen, last round, steps then]
    for k in torch.nonzero(report.participated.cpu()).flatten().tolist():
        count = seen.get(report.client_ids[k], [0.0])[0]
        seen[report.client_ids[k]] = [count + 1.0, float(t), float(steps[k])]
    past = torch.tensor(
        [seen.get(report.client_ids[k], [0.0, float(t), 0.0]) for k in clients.tolist()], dtype=torch.float64
    ).reshape(-1, 3)
    sizes = report.num_examples.cpu().double()[clients]
    shares = sizes / sizes.sum()
    rows = report.layout.params(updates.rows)
    previous: Tensor | None = known["previous"]
    gram, along = _products(rows, previous)
    norms = gram.diagonal().clamp(min=0).sqrt()
    to_mean = gram @ shares
    mean_square = float(shares @ to_mean)
    mean_norm = math.sqrt(max(mean_square, 0.0))
    safe = norms.clamp(min=1e-30)
    cosines = (gram / safe / safe[:, None]).clamp(0, 1)
    redundancy = (cosines @ shares).clamp(min=1e-6).log()
    agreement = _ratio(to_mean, safe * mean_norm)
    turn = growth = 0.0
    persistence = torch.zeros_like(norms)
    if previous is not None:
        before = float(previous.norm())
        persistence = _ratio(along, safe * before)
        turn = float(_ratio(shares @ along, torch.tensor(mean_norm * before)))
        growth = _log_ratio(mean_norm, known["norm"])
    of_clients = torch.stack(
        [
            _relative(sizes),
            _relative(past[:, 2]),
            _relative(norms.square()) / 2,
            agreement,
            redundancy,
            persistence,
            _relative(1 + past[:, 0]),
            torch.log1p(t - past[:, 1]),
        ],
        1,
    )
    effort = past[:, 2]
    of_round = torch.tensor(
        [
            _log_ratio(float(shares @ norms.square()), mean_square),
            turn,
            growth,
            -1.0 if horizon is None else min(1.0, t / horizon),
            math.log1p(t),
            math.log(max(1, len(clients))),
            math.log(max(1.0, float(effort.mean()))) if len(effort) else 0.0,
        ],
        dtype=torch.float64,
    )
    bounded = of_clients.clamp(-LARGEST, LARGEST), of_round.clamp(-LARGEST, LARGEST)
    return RoundFeatures(clients, shares, *bounded, {"seen": seen, "previous": previous, "norm": mean_norm})


def _products(rows: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """⟨m_j, m_k⟩, [n, n], and ⟨m_k, ū⟩, [n]; only these leave the device."""
    gram = (rows @ rows.T).cpu().double()
    along = torch.zeros(len(rows), dtype=torch.float64) if previous is None else (rows @ previous).cpu().double()
    return gram, along


def _relative(values: Tensor) -> Tensor:
    """log(x / mean x), 0 where x is not known."""
    mean = values.mean() if len(values) else values.new_ones(())
    return torch.where((values > 0) & (mean > 0), values / mean.clamp(min=1e-300), 1.0).log()


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 1e-30, above / below.clamp(min=1e-30), 0.0).clamp(-1, 1)


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 and below > 0 else 0.0
