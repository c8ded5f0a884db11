"""Server optimisers: what the server does with the direction u = s Σ_k Θ_k (w_k − w^(t)).

| name     | update                                                       |
|----------|--------------------------------------------------------------|
| sgd      | w + η u                                                      |
| momentum | m ← β m + u,  w + η m                                        |
| exp      | w + max(1, Σ_k α_k ‖Δ_k‖² / (2 (‖u‖² + ε))) u               |
| fedlws   | γ (w + u), γ = ‖w‖ / (‖w‖ + τ ‖u‖) for every layer          |
| grafted  | w + η ‖u‖ r/‖r‖, r = u / (√v + c √mean v)                    |
| adam, yogi, adagrad | a step size for every coordinate (`adaptive`)     |

An update is a pure function of (w, u, state), so that the adjoint differentiates any of them.

>>> sgd(lr=0.5).describe()
{'name': 'sgd', 'lr': 0.5}
"""

from fedunfold.server.adaptive import Adagrad as adagrad
from fedunfold.server.adaptive import Adam as adam
from fedunfold.server.adaptive import Yogi as yogi
from fedunfold.server.exp import Exp as exp
from fedunfold.server.fedlws import FedLWS as fedlws
from fedunfold.server.grafted import Grafted as grafted
from fedunfold.server.momentum import Momentum as momentum
from fedunfold.server.sgd import SGD as sgd

__all__ = ["adagrad", "adam", "exp", "fedlws", "grafted", "momentum", "sgd", "yogi"]
