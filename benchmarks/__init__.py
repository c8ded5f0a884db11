"""How fast the engine is, measured side by side in one run on made-up data of the paper's shapes; what the outer steps
of the learning are worth; and what a device takes."""

from benchmarks.device import DeviceBench, device_page, measure_device
from benchmarks.markdown import growth_figure, page
from benchmarks.schedule_study import Schedules, measure_schedules, schedules_figure, schedules_page
from benchmarks.timing import Bench, measure

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
