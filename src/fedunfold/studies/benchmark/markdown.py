"""Tables in Markdown with a row for each method and a column for each environment."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev

Rows = Iterable[Sequence[str]]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation; a dash for nothing.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 ± 1.00'
    """
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "diverged"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def table(heads: Sequence[str], rows: Rows) -> str:
    """A Markdown table: the first column is of words, the others of numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_method(
    environments: Sequence[str], methods: Iterable[str], cell: Callable[[str, str], str], first: str = "method"
) -> str:
    """A table with a row for each method and a column for each federation; methods nobody ran are left out."""
    rows = [[method, *(cell(environment, method) for environment in environments)] for method in methods]
    return table([first, *environments], [row for row in rows if set(row[1:]) != {"–"}])
