"""Learned weights: a rule read off a file, with how it was learned."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save as serialize
from torch import Tensor

from fedunfold.core.algorithm import Algorithm
from fedunfold.core.errors import InputError
from fedunfold.core.messages import ClientUpdates, Metric
from fedunfold.core.settings import Count, Settings
from fedunfold.core.text_table import TextTable
from fedunfold.io.atomic import is_plain_file, write_atomically
from fedunfold.io.checkpoint import NO_CHECKSUM, DamagedError, embed_checksum, verify_checksum
from fedunfold.io.limits import LimitError
from fedunfold.io.safetensors import UNREADABLE, read_tensors
from fedunfold.rules.rule import State, simplex_violation
from fedunfold.version import VERSION

FORMAT = 2
DESCRIPTION = ("client_ids", "settings", "digest", "version", "warnings")
TENSORS = ("weights", "losses", "history")


class Header(Settings):
    """What a file holds beside its tensors; the checksum is that of `io.checkpoint`."""

    checksum: str = ""
    format: Count
    client_ids: tuple[str, ...] = Field(min_length=1)
    rounds: Count
    settings: dict[str, Any]
    digest: str
    version: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LearnedWeights:
    """A table of weights learned for a federation, its clients and its rounds: the weighting rule Θ^(t) = weights[t].

    Attributes:
        client_ids: The clients.
        weights: Θ, [T, K].
        losses: The outer loss of every iteration, [M]; it belongs to the weights history[:M].
        history: Θ before the first iteration and after each, [M+1, T, K].
        settings: How they were learned, and with which algorithm, in plain values.
        digest: Stands for the federation they were learned on.
        version: Of the package that learned them.
        name: What they are called in tables.
        required_metrics: Nothing has to be reported for them.
        warnings: What was odd about learning them, a line each.

    >>> import fedunfold as fu
    >>> learned = fu.learn_weights("digits-label-skew", learning=fu.Learning(iterations=1))
    >>> learned
    LearnedWeights(rounds=10, clients=5, iterations=1)
    """

    client_ids: tuple[str, ...]
    weights: Tensor
    losses: Tensor
    history: Tensor
    settings: dict[str, Any]
    digest: str = ""
    version: str = VERSION
    name: str = "learned"
    required_metrics: frozenset[Metric] = field(default=frozenset(), repr=False)
    warnings: tuple[str, ...] = ()
    numbers_only: ClassVar[bool] = True
    """As `Rule.numbers_only`."""

    def __repr__(self) -> str:
        rounds, clients = self.weights.shape
        return f"LearnedWeights(rounds={rounds}, clients={clients}, iterations={len(self.losses)})"

    def _repr_html_(self) -> str:
        """Θ for a notebook: a row for each client, shaded by its weight."""
        rows = self.weights.T.tolist()
        return TextTable(
            f"{self!r}: how much each client counts in each round",
            ("client", *(str(t + 1) for t in range(len(self.weights)))),
            [(key, *(f"{weight:.2f}" for weight in row)) for key, row in zip(self.client_ids, rows, strict=True)],
            [(0.0, *row) for row in rows],
        ).html()

    def __call__(self, report: ClientUpdates, state: State) -> tuple[Tensor, State]:
        if report.client_ids != self.client_ids:
            raise InputError(_other_clients(self.client_ids, report.client_ids))
        if report.round >= len(self.weights):
            raise InputError(
                f"the weights were learned for {len(self.weights)} rounds and have none for round "
                f"{report.round}; map them to more rounds to repeat the last row."
            )
        return self.weights[report.round], state

    @property
    def algorithm(self) -> Algorithm:
        """What they were learned for, with the step sizes learned beside them."""
        try:
            return Algorithm.from_description(self.settings["algorithm"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the learned weights do not say what they were learned for ({error}).") from error

    def adapt(self, keys: Sequence[str], rounds: int, digest: str, *, allow_mapping: bool = False) -> "LearnedWeights":
        """These weights for a federation.

        Args:
            keys: Its clients.
            rounds: T.
            digest: What stands for it; an empty one, theirs or ours, for a federation that was not described.
            allow_mapping: Whether they may be mapped to another federation: by client id (every client must be known;
                rows are renormalised over those taken) and by round (a shorter run takes the first rows, rounds beyond
                T repeat the last).

        Raises:
            InputError: Where it is another federation and mapping is not allowed, or not possible.
        """
        same_federation = digest == self.digest or not (digest and self.digest)
        if tuple(keys) == self.client_ids and rounds == len(self.weights) and same_federation:
            return self
        if not allow_mapping:
            raise InputError(self._mismatch(tuple(keys), rounds))
        unknown = [key for key in keys if key not in self.client_ids]
        if unknown:
            raise InputError(
                f"the weights cannot be mapped: client '{unknown[0]}' was not in the federation they were "
                f"learned on ({', '.join(self.client_ids)})."
            )
        columns = torch.tensor([self.client_ids.index(key) for key in keys])
        rows = torch.arange(rounds).clamp(max=len(self.weights) - 1)
        weights = self.weights[rows][:, columns]
        totals = weights.sum(1, keepdim=True)
        if bool((totals <= 0).any()):
            raise InputError("the weights cannot be mapped: these clients have weight 0 in one of the rounds.")
        history = self.history[:, rows][:, :, columns]
        history = history / history.sum(-1, keepdim=True)
        return replace(self, client_ids=tuple(keys), weights=weights / totals, history=history, digest=digest)

    def _mismatch(self, keys: tuple[str, ...], rounds: int) -> str:
        if keys != self.client_ids:
            return _other_clients(self.client_ids, keys)
        if rounds != len(self.weights):
            return (
                f"the weights were learned for {len(self.weights)} rounds and the run has {rounds}; run as many, or "
                "allow mapping (allow_mapping=True), which cuts, or repeats the last row."
            )
        return (
            "the weights were learned on another federation (same client keys, other data, epochs, participation "
            "probability, model or step size); learn them again, or allow mapping (allow_mapping=True) to use them "
            "all the same."
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; the same weights give the same bytes."""
        header = {"checksum": NO_CHECKSUM, "format": FORMAT, "rounds": len(self.weights)}
        header |= {name: getattr(self, name) for name in DESCRIPTION}
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        # One metadata entry: several would come out in an order that changes from process to process.
        content = embed_checksum(serialize(tensors, {"fedunfold": json.dumps(header, sort_keys=True)}))
        write_atomically(Path(path), lambda temporary: temporary.write_bytes(content))

    @classmethod
    def load(cls, path: str | Path) -> "LearnedWeights":
        """Read what `save` wrote; nothing in the file is executed."""
        path = Path(path)
        if not is_plain_file(path):
            raise InputError(f"there is no weights file {path}; learn weights and save them there.")
        try:
            tensors, metadata = read_tensors(path, "pt")
            header = Header(**json.loads(metadata["fedunfold"]))
            if header.checksum and not verify_checksum(path.read_bytes()):
                raise ValueError("its checksum does not hold")
            parts: dict[str, Any] = {name: _numbers(tensors[name]) for name in TENSORS}
            learned = cls(**parts | {name: getattr(header, name) for name in DESCRIPTION})
        except LimitError:
            raise  # too large is not damaged
        except UNREADABLE as error:
            raise DamagedError(
                f"weights file {path} is damaged or not one of fedunfold's ({type(error).__name__}: "
                f"{' '.join(str(error).split())}); "
                "learn the weights again."
            ) from error
        if header.format != FORMAT:
            raise InputError(f"weights file {path} has format {header.format}; this version reads {FORMAT}.")
        learned._check(path)
        return learned

    def _check(self, path: Path) -> None:
        rounds, clients, iterations = len(self.weights), len(self.client_ids), self.losses.numel()
        shapes = ((rounds, clients), (iterations,), (iterations + 1, rounds, clients))
        for name, shape in zip(TENSORS, shapes, strict=True):
            found = getattr(self, name).shape
            if found != shape or rounds == 0:
                raise InputError(f"weights file {path} is inconsistent: '{name}' has shape {list(found)}.")
        if odd := [key for key in self.client_ids if not key.isprintable()]:
            raise InputError(f"weights file {path} is inconsistent: it names a client {odd[0]!r}.")
        if len(set(self.client_ids)) < clients:
            raise InputError(f"weights file {path} is inconsistent: it names a client twice.")
        if not bool(torch.isfinite(self.losses).all() and torch.isfinite(self.history).all()):
            raise InputError(f"weights file {path} is inconsistent: its history is not finite.")
        for t, row in enumerate(self.weights):
            if problem := simplex_violation(row, self.client_ids):
                raise InputError(f"weights file {path}: round {t} {problem}.")


def _numbers(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point or tensor.dim() == 0:
        raise ValueError(f"expected an array of floating-point numbers, not {tensor.dtype} {list(tensor.shape)}")
    return tensor.double()


def _other_clients(mine: Sequence[str], theirs: Sequence[str]) -> str:
    strangers = [key for key in theirs if key not in mine] or [key for key in mine if key not in theirs]
    about = f"'{strangers[0]}' is in only one of them" if strangers else "in another order"
    return (
        f"the weights belong to another federation: their clients are {_some(mine)}, the run's are "
        f"{_some(theirs)} ({about}); learn weights for this one, or allow mapping (allow_mapping=True)."
    )


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f", … ({len(keys)} in all)" if len(keys) > 5 else "")
