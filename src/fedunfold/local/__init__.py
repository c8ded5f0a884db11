"""Client optimisers: what client k does between receiving w^(t) and returning w_k.

For τ = 0 … τ_k−1 on minibatches b, with w_k from w^(t):

| name        | step                                             | then                                       |
|-------------|--------------------------------------------------|--------------------------------------------|
| sgd         | w ← w − η ∇ℓ_b(w)                                |                                            |
| prox(μ)     | w ← w − η (∇ℓ_b(w) + μ (w − w^(t)))              |                                            |
| nova        | w ← w − η (τ_eff/τ_k) ∇ℓ_b(w)                    |                                            |
| momentum(ρ) | v ← ρ v + ∇ℓ_b(w),  w ← w − η v                  |                                            |
| scaffold    | w ← w − η (∇ℓ_b(w) − c_k + c)                    | c_k, c (`core.control`)                    |
| feddyn(α)   | w ← w − η (∇ℓ_b(w) − h_k + α (w − w^(t)))        | h_k, and h: w^(t+1) − h/α                  |
| adamw       | Adam's, bias-corrected, and w ← (1 − ηλ) w       |                                            |
| decayed(λ)  | the base's with ∇ℓ_b(w) + λ w                    |                                            |
| clipped(c)  | the base's with ∇ℓ_b(w) of norm c at most        |                                            |
| accumulated | the base's                                       | w_k ← w^(t) + (τ_eff/‖a_k‖₁)(w_k − w^(t))    |
"""

from fedunfold.local.adamw import AdamW as adamw
from fedunfold.local.clipped import Clipped as clipped
from fedunfold.local.decayed import Decayed as decayed
from fedunfold.local.feddyn import FedDyn as feddyn
from fedunfold.local.momentum import Momentum as momentum
from fedunfold.local.nova import Accumulated as accumulated
from fedunfold.local.nova import Nova as nova
from fedunfold.local.prox import Prox as prox
from fedunfold.local.scaffold import Scaffold as scaffold
from fedunfold.local.sgd import SGD as sgd

__all__ = ["accumulated", "adamw", "clipped", "decayed", "feddyn", "momentum", "nova", "prox", "scaffold", "sgd"]
