"""What `compare --leave-out` leaves in result.json, as far as it is read again."""

from fedunfold.runs.schema import Record


class LeftOutRow(Record):
    """What a method reaches.

    Attributes:
        method: The method's name.
        left_out: By client, the primary metric on its rows of models trained without it, the mean of the trials,
            fractions in percent; None where it is not known.
    """

    method: str
    left_out: dict[str, float | None]


class LeftOutRecord(Record):
    """The file.

    Attributes:
        methods: In the order in which they were run.
    """

    methods: tuple[LeftOutRow, ...]
