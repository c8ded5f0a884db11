"""How fast the engine is: ratios measured side by side in one run, on made-up data of the paper's shapes."""

from fedunfold.bench.measuring import Bench, measure
from fedunfold.bench.page import page

__all__ = ["Bench", "measure", "page"]
