"""What a client has revealed, and must never reveal in another way: it outlives a sum, a run and a restart."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedunfold.core.errors import InputError
from fedunfold.core.settings import Natural, Settings


class SumEntry(Settings):
    """A sum that a client's vector has entered.

    Attributes:
        statement: The digest of who was in it, by how much each counted, and from what the vector came.
        survivors: The digest of those who were left in the end, where this client has confirmed them.
    """

    statement: str
    survivors: str = ""


@dataclass(frozen=True)
class Claim:
    """One way to name what a client is about to add up: its round, or its model.

    Attributes:
        key: The name, under which nothing else may ever be added up.
        statement: As of `SumEntry`.
        about: The name for people, such as "round 3 of run trial-0".
    """

    key: str
    statement: str
    about: str


class SumRecord(Settings):
    """All that a client has revealed so far.

    Attributes:
        sums: By what each was of.
        projections: How many projections of its updates it has answered.
        by_model: How many of them were of the update from one model, by the model's digest.
    """

    sums: Mapping[str, SumEntry] = {}
    projections: Natural = 0
    by_model: Mapping[str, Natural] = {}

    @property
    def size(self) -> int:
        """Grows with everything that is revealed."""
        return len(self.sums) + self.projections

    def after_sum(self, claims: tuple[Claim, ...]) -> "SumRecord":
        """The record once a vector is masked.

        The same sum may be made again, after a server was interrupted: it says nothing new.

        Raises:
            InputError: Where the same was in another sum; the message is the end of a sentence.
        """
        for claim in claims:
            if claim.key in self.sums and self.sums[claim.key].statement != claim.statement:
                raise InputError(
                    f"has added up {claim.about} before, with other clients or weights, and does so once; begin the "
                    "run anew, under another name."
                )
        new = {c.key: SumEntry(statement=c.statement) for c in claims if c.key not in self.sums}
        return self.model_copy(update={"sums": {**self.sums, **new}})

    def after_survivors(self, keys: tuple[str, ...], survivors: str) -> "SumRecord":
        """The record once a list of survivors is confirmed; the same is confirmed again, another one refused."""
        for key in keys:
            if self.sums[key].survivors not in ("", survivors):
                raise InputError(
                    "has confirmed another list of clients for the same vectors before; begin the run anew, under "
                    "another name."
                )
        confirmed = {key: self.sums[key].model_copy(update={"survivors": survivors}) for key in keys}
        return self.model_copy(update={"sums": {**self.sums, **confirmed}})

    def after_projection(self, model: str, *, a_model: int, in_all: int) -> "SumRecord":
        """The record once a projection is answered.

        Args:
            model: The digest of the model that the update begins from.
            a_model: How many are answered of one.
            in_all: How many are answered ever.
        """
        count = self.by_model.get(model, 0)
        if count >= a_model:
            raise InputError(
                f"has answered {count} projections of this update and answers no more (max-projections-a-round)."
            )
        if self.projections >= in_all:
            raise InputError(
                f"has answered {self.projections} projections of its updates, all that it ever answers "
                "(max-projections)."
            )
        by_model = {**self.by_model, model: count + 1}
        return self.model_copy(update={"projections": self.projections + 1, "by_model": by_model})
