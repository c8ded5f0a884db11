"""Client optimisers: what client k does between receiving w^(t) and returning w_k."""

from fedunfold.local.optimizers import LocalOptimizer, accumulated, momentum, nova, prox, sgd

__all__ = ["LocalOptimizer", "accumulated", "momentum", "nova", "prox", "sgd"]
