"""From a round's updates to one direction: absent clients, aggregators, rejection of bad updates."""

from fedunfold.aggregation.robust import Krum as krum
from fedunfold.aggregation.robust import Mean as mean
from fedunfold.aggregation.robust import Median as median
from fedunfold.aggregation.robust import TrimmedMean as trimmed_mean

__all__ = ["krum", "mean", "median", "trimmed_mean"]
