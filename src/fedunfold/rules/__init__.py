"""Weighting rules: how much each client counts in each round, Θ_k^(t) ≥ 0 with Σ_k Θ_k^(t) = 1.

| rule     | Θ_k                                   | required metrics   | for                                    |
|----------|---------------------------------------|--------------------|----------------------------------------|
| size     | N_k/N                                 |                    | like data on all clients               |
| uniform  | 1/K                                   |                    | the same say for everyone              |
| fixed    | a given matrix                        |                    | weights learned or chosen beforehand   |
| dr       | ∝ (N_k/N) F_k^(q+1)                   | loss or start_loss | not leaving badly served clients       |
| fedadp   | ∝ N_k exp(h(angle to the average))    | gradients          | outvoting clients with odd data        |
| fedfa    | accuracy and participation            | accuracy           | clients that come and go               |
| fedlaw   | the best on data of the server        |                    | a server with some data of its own     |
| unbiased | ∝ N_k/π_k over the cohort, and a step |                    | cohorts that are not sampled uniformly |

A rule of one's own is a function `(report, state) -> (weights, state)`; `rule` names what it needs of clients.
"""

from fedunfold.rules.dr import dr
from fedunfold.rules.fedadp import fedadp
from fedunfold.rules.fedfa import fedfa
from fedunfold.rules.fedlaw import fedlaw
from fedunfold.rules.fixed import fixed
from fedunfold.rules.rule import RULES, Rule, State, WeightingRule, as_rule, rule
from fedunfold.rules.size import size
from fedunfold.rules.unbiased import unbiased
from fedunfold.rules.uniform import uniform

__all__ = [
    "RULES",
    "Rule",
    "State",
    "WeightingRule",
    "as_rule",
    "dr",
    "fedadp",
    "fedfa",
    "fedlaw",
    "fixed",
    "rule",
    "size",
    "unbiased",
    "uniform",
]
