"""Weighting rules: how much each client counts in each round, Θ_k^(t) ≥ 0 with Σ_k Θ_k^(t) = 1.

| rule     | Θ_k                                   | required metrics   | for                                    |
|----------|---------------------------------------|--------------------|----------------------------------------|
| size     | N_k/N                                 |                    | like data on all clients               |
| uniform  | 1/K                                   |                    | the same say for everyone              |
| fixed    | a given matrix                        |                    | weights learned or chosen beforehand   |
| dr       | ∝ (N_k/N) F_k^(q+1)                   | loss or start_loss | not leaving badly served clients       |
| q-fedavg | ∝ F_k^q, and a step                   | start_loss, norm   | the same, by steps that stay stable    |
| afl      | climbs F_k on the simplex             | start_loss         | the worst mixture of clients           |
| fedadp   | ∝ N_k exp(h(angle to the average))    | gradients          | outvoting clients with odd data        |
| fedawa   | a softmax learned from updates        |                    | the same, with a memory                |
| fedbuff  | ∝ 1/√(1 + staleness), and a step      |                    | asynchronous rounds                    |
| feddisco | ∝ max(0, N_k/N − a d_k + b)           | (label counts)     | clients that hold few classes          |
| fedfa    | accuracy and participation            | accuracy           | clients that come and go               |
| fedlaw   | the best on data of the server        | (server data)      | a server with some data of its own     |
| unbiased | ∝ N_k/π_k over the cohort, and a step |                    | cohorts that are not sampled uniformly |

`online-hypergradient` descends the loss, as the next round's updates show it, by a softmax and a step: weights that are
learned while the model is trained.

A rule of one's own is a function `(report, state) -> (weights, state)`; `rule` names what it needs of clients.
"""

from fedunfold.rules.afl import afl
from fedunfold.rules.dr import dr
from fedunfold.rules.fedadp import fedadp
from fedunfold.rules.fedawa import fedawa
from fedunfold.rules.fedbuff import fedbuff
from fedunfold.rules.feddisco import feddisco
from fedunfold.rules.fedfa import fedfa
from fedunfold.rules.fedlaw import fedlaw
from fedunfold.rules.fixed import fixed
from fedunfold.rules.online_hypergradient import online_hypergradient
from fedunfold.rules.q_fedavg import q_fedavg
from fedunfold.rules.rule import RULES, Rule, State, WeightingRule, as_rule, rule
from fedunfold.rules.size import size
from fedunfold.rules.unbiased import unbiased
from fedunfold.rules.uniform import uniform

__all__ = [
    "RULES",
    "Rule",
    "State",
    "WeightingRule",
    "afl",
    "as_rule",
    "dr",
    "fedadp",
    "fedawa",
    "fedbuff",
    "feddisco",
    "fedfa",
    "fedlaw",
    "fixed",
    "online_hypergradient",
    "q_fedavg",
    "rule",
    "size",
    "unbiased",
    "uniform",
]
