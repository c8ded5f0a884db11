"""Weights known beforehand."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates
from fedunfold.rules.rule import Rule, State, simplex_violation


def fixed(
    matrix: Tensor | np.ndarray | Sequence[Sequence[float]],
    *,
    name: str = "fixed",
    client_ids: Sequence[str] | None = None,
) -> Rule:
    """Use the rows of a given matrix, one for each round.

        Θ_k^(t) = matrix[t, k]

    For weights that were learned elsewhere, read from a file or chosen by hand. The columns stand for the
    clients in the order in which the federation lists them.

    Args:
        matrix: Θ, [T, K], every row on the simplex.
        name: What it is called in tables.
        client_ids: Whose the columns are, in any order. Needed where the order of clients is not known beforehand, as
            over Flower, which lists them as they answer.

    >>> fixed([[0.5, 0.5], [0.9, 0.1]]).name
    'fixed'
    """
    try:
        # A copy: what the caller does to its matrix later must not reach the rule.
        plain = matrix.detach().cpu().double().numpy() if isinstance(matrix, Tensor) else matrix
        values = torch.from_numpy(np.array(plain, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise InputError(f"the weights '{name}' are not a matrix of numbers: {error}.") from error
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"the weights '{name}' need the shape [rounds, clients], not {list(values.shape)}.")
    rounds, clients = values.shape
    for t, row in enumerate(values):
        if problem := simplex_violation(row, [f"client {k}" for k in range(clients)]):
            raise InputError(f"row {t} of the weights '{name}' {problem}.")

    names = None if client_ids is None else tuple(client_ids)
    if names is not None and (len(names) != clients or len(set(names)) != clients):
        raise InputError(f"the weights '{name}' have {clients} columns and {len(set(names))} names; give each its own.")

    def weigh(report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        if report.round >= rounds:
            raise InputError(
                f"the weights '{name}' have {rounds} rows and none for round {report.round} (counted from 0);"
                f" run at most {rounds} rounds or give a matrix with a row for each."
            )
        if len(report.client_ids) != clients:
            raise InputError(
                f"the weights '{name}' have {clients} columns, but the federation has"
                f" {len(report.client_ids)} clients; give a matrix with a column for each."
            )
        if names is None or names == report.client_ids:
            return values[report.round].clone(), state
        if unknown := sorted(set(report.client_ids) - set(names)):
            raise InputError(
                f"the weights '{name}' have no column for client '{unknown[0]}'; add one, or leave it out."
            )
        return values[report.round, [names.index(client_id) for client_id in report.client_ids]], state

    return Rule(name, weigh, numbers_only=True, client_ids=names)
