"""scikit-learn's medical tables, divided by a covariate into sites; they come with scikit-learn, no file is needed."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedunfold.data.natural.base import Clients, HeldOutSource
from fedunfold.data.sources import Pair

SITES = ("site-a", "site-b", "site-c", "site-d")


class DiabetesSitesSource(HeldOutSource):
    """442 diabetes patients, ten features, how far the disease went in a year; four sites by quarters of body mass.

    Site a has the leanest patients, site d the heaviest, who also fare worst: features and targets differ.

    Reference: Efron, Hastie, Johnstone and Tibshirani 2004, Least Angle Regression.
    """

    source: Literal["diabetes-sites"] = "diabetes-sites"

    def load_clients(self) -> tuple[Clients, Pair]:
        from sklearn.datasets import load_diabetes  # here, because importing it takes a second

        table = load_diabetes(scaled=False)
        owners = _by_quarter(table.data[:, table.feature_names.index("bmi")])
        return self.split_by_owner(table.data, table.target.astype(np.float32), owners)


class BreastCancerSitesSource(HeldOutSource):
    """569 tumours, 30 features, target 1 for a benign one; four sites by quarters of the mean texture.

    Reference: Street, Wolberg and Mangasarian 1993, Nuclear feature extraction for breast tumor diagnosis.
    """

    source: Literal["breast-cancer-sites"] = "breast-cancer-sites"

    def load_clients(self) -> tuple[Clients, Pair]:
        from sklearn.datasets import load_breast_cancer

        table = load_breast_cancer()
        owners = _by_quarter(table.data[:, list(table.feature_names).index("mean texture")])
        return self.split_by_owner(table.data, table.target, owners, tuple(map(str, table.target_names)))


def _by_quarter(covariate: NDArray[Any]) -> list[str]:
    """The site of each row, in the order of the sites' keys on its first use."""
    cuts = np.quantile(covariate, [0.25, 0.5, 0.75])
    return [SITES[quarter] for quarter in np.searchsorted(cuts, covariate, side="left")]
