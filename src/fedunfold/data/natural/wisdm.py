"""WISDM: what 36 people do, from the accelerometer of a phone in their pocket."""

from typing import Literal

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.natural.base import Clients, HeldOutSource
from fedunfold.data.natural.files import PublicFile, parse_numbers, read_public
from fedunfold.data.sources import Pair

FILE = PublicFile(  # published inside an archive whose checksum is not known
    "wisdm_transformed.arff",
    "https://www.cis.fordham.edu/wisdm/dataset.php (Activity Prediction, WISDM_ar_v1.1_transformed.arff)",
)
ACTIVITIES = ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")
FEATURES = 43


class WisdmSource(HeldOutSource):
    """Windows of ten seconds of 36 users, 43 features, six activities; the clients are user-1 … user-36.

    A cell is (id, user, features, activity); a missing feature takes the median over the training rows.

    Reference: Kwapisz, Weiss and Moore 2010, Activity Recognition using Cell Phone Accelerometers (v1.1).
    """

    source: Literal["wisdm"] = "wisdm"

    def load_clients(self) -> tuple[Clients, Pair]:
        name, text = read_public(FILE)
        head, mark, body = text.partition("@data\n")
        if not mark:
            raise InputError(f"{name} has no @data section, as an ARFF file has; get the file again.")
        cells = [line.split(",") for line in body.splitlines() if line.strip()]
        first = head.count("\n") + 2
        for number, line in enumerate(cells, first):
            if len(line) != FEATURES + 3 or line[-1] not in ACTIVITIES or not line[1].isdecimal():
                raise InputError(
                    f"{name}, line {number}: is not an id, a user, {FEATURES} features and an activity; "
                    "get the file again."
                )
        x = parse_numbers([line[2:-1] for line in cells], name, first)
        y = np.array([ACTIVITIES.index(line[-1]) for line in cells])
        return self.split_by_owner(x, y, [f"user-{line[1]}" for line in cells], ACTIVITIES)
