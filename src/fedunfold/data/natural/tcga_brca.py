"""TCGA-BRCA: survival of breast cancer patients in six regions, as FLamby prepares and splits it."""

import csv
from typing import Literal

import numpy as np

from fedunfold.core.errors import InputError
from fedunfold.data.natural.base import Clients, NaturalSource, standardise
from fedunfold.data.natural.files import PublicFile, parse_numbers, read_public
from fedunfold.data.sources import Pair

PAGE = "https://github.com/owkin/FLamby/tree/main/flamby/datasets/fed_tcga_brca"
RAW = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca"
PATIENTS = PublicFile(
    "tcga_brca.csv", PAGE, f"{RAW}/brca.csv", "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020"
)
SPLIT = PublicFile(
    "tcga_train_test_split.csv",
    PAGE,
    f"{RAW}/dataset_creation_scripts/train_test_split.csv",
    "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
)
REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")
"""FLamby's centres 0 to 5."""
FEATURES = 39


class TcgaBrcaSource(NaturalSource):
    """1,088 patients in six regions, 39 clinical features, targets (days, death), FLamby's training and test rows.

    Attributes:
        scaling: With "standard", features are standardised over the training rows; FLamby leaves them as they are.

    Reference: Ogier du Terrail et al. 2022, FLamby; Andreux et al. 2020, Federated Survival Analysis with
    Discrete-Time Cox Models.
    """

    source: Literal["tcga-brca"] = "tcga-brca"
    scaling: Literal["none", "standard"] = "standard"

    def load_clients(self) -> tuple[Clients, Pair]:
        name, header, patients, cells = _read(PATIENTS, "pid")
        if header[-2:] != ["E", "T"] or len(header) != FEATURES + 3:
            raise InputError(f"{name} needs a column pid, {FEATURES} features, and then E and T; get the file again.")
        values = parse_numbers(cells, name, first_line_number=2)
        x, y = values[:, :FEATURES].astype(np.float32), values[:, [-1, -2]].astype(np.float32)
        row_of = {patient: row for row, patient in enumerate(patients)}
        parts: dict[str, list[int]] = {}
        split_name, split_header, split_patients, folds = _read(SPLIT, "pid")
        if split_header[1:] != ["fold", "fold2"]:
            raise InputError(f"{split_name} needs the columns pid, fold and fold2; get the file again.")
        for patient, (_, part) in zip(split_patients, folds, strict=True):
            if patient not in row_of:
                raise InputError(f"{split_name} lists patient {patient}, whom {name} lacks; get both files again.")
            parts.setdefault(part, []).append(row_of[patient])
        wanted = {f"{fold}_{centre}" for fold in ("train", "test") for centre in range(len(REGIONS))}
        if parts.keys() != wanted:
            odd = sorted(parts.keys() ^ wanted)[0]
            raise InputError(f"{split_name}: there must be the parts train_0 to test_5, see {odd}; get the file again.")
        rows = {part: np.array(own) for part, own in parts.items()}
        train = [rows[f"train_{centre}"] for centre in range(len(REGIONS))]
        test = np.concatenate([rows[f"test_{centre}"] for centre in range(len(REGIONS))])
        if self.scaling == "standard":
            x = standardise(x, np.concatenate(train))
        return {key: (x[own], y[own]) for key, own in zip(REGIONS, train, strict=True)}, (x[test], y[test])


def _read(file: PublicFile, key: str) -> tuple[str, list[str], list[str], list[list[str]]]:
    """(name for messages, header, first column, other cells) of a CSV file whose first column identifies a row."""
    name, text = read_public(file)
    lines = list(csv.reader(text.splitlines()))
    if not lines or lines[0][:1] != [key]:
        raise InputError(f"{name} has no first column {key}; get the file again.")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise InputError(
                f"{name}, line {number}: has {len(line)} cells, where {len(lines[0])} belong; get the file again."
            )
    keys = [line[0] for line in lines[1:]]
    if len(set(keys)) < len(keys):
        raise InputError(f"{name} lists a {key} twice; get the file again.")
    return name, lines[0], keys, [line[1:] for line in lines[1:]]
