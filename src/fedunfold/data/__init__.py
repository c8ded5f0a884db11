"""Datasets, their partition over clients, and the checked result of both."""

from fedunfold.data.federated import FederatedData

__all__ = ["FederatedData"]
