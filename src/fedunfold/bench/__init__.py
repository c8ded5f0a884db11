"""How fast the engine is, measured side by side in one run on made-up data of the paper's shapes; and what the outer
steps of the learning are worth."""

from fedunfold.bench.measuring import Bench, measure
from fedunfold.bench.page import growth_figure, page
from fedunfold.bench.schedules import Schedules, measure_schedules, schedules_figure, schedules_page

__all__ = [
    "Bench",
    "Schedules",
    "growth_figure",
    "measure",
    "measure_schedules",
    "page",
    "schedules_figure",
    "schedules_page",
]
