"""How fast the engine is, measured side by side in one run on made-up data of the paper's shapes; what the outer steps
of the learning are worth; and what a device takes."""

from fedunfold.bench.device import DeviceBench, device_page, measure_device
from fedunfold.bench.measuring import Bench, measure
from fedunfold.bench.page import growth_figure, page
from fedunfold.bench.schedules import Schedules, measure_schedules, schedules_figure, schedules_page

__all__ = [
    "Bench",
    "DeviceBench",
    "Schedules",
    "device_page",
    "growth_figure",
    "measure",
    "measure_device",
    "measure_schedules",
    "page",
    "schedules_figure",
    "schedules_page",
]
