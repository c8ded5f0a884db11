"""Client samplers: who is sampled for a round, C = `clients_per_round` of K clients.

| sampler         | the cohort                                 | π_k     | clients report | for                        |
|-----------------|--------------------------------------------|---------|----------------|----------------------------|
| uniform         | any C alike                                | C/K     |                | the usual choice           |
| by-size         | the likelier the more data                 | ∝ N_k   |                | few clients with most data |
| importance      | the likelier the larger the last update    | ∝ ‖Δ_k‖ | norm           | few that still learn       |
| power-of-choice | of d by size those with the largest losses | –       | start_loss     | the worst served first     |
| round-robin     | one after the other                        | –       |                | everybody equally often    |

π_k is the probability that client k is in the cohort, capped at 1; with the rule `unbiased` the average is right in
expectation whatever the π_k. One of your own is a class with `sample` (docs/extending.md).
"""

from fedunfold.selection.by_size import BySize
from fedunfold.selection.importance import Importance
from fedunfold.selection.power_of_choice import PowerOfChoice
from fedunfold.selection.round_robin import RoundRobin
from fedunfold.selection.uniform import Uniform

__all__ = ["BySize", "Importance", "PowerOfChoice", "RoundRobin", "Uniform"]
