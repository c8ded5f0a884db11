"""Small tables: plain text in a terminal, HTML in a notebook, Markdown in a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class TextTable:
    """A small table; the first column holds names, the others numbers.

    Attributes:
        caption: What it shows.
        heads: Of the columns.
        rows: Of cells.
        shades: In [0, 1], one for each cell: the larger, the stronger an HTML cell is coloured.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float]] = ()

    def text(self) -> str:
        """Columns padded to their widest cell.

        >>> print(TextTable("fruit", ("name", "n"), [("fig", "1"), ("lime", "20")]).text())
        fruit
        name   n
        fig    1
        lime  20
        """
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        lines = [self.caption]
        for cells in (self.heads, *self.rows):
            numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            lines.append("  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip())
        return "\n".join(lines)

    def html(self) -> str:
        """The same as a `<table>`; colours are see-through, so that they fit light and dark pages."""
        head = "".join(f"<th{_aligned(i)}>{escape(cell)}</th>" for i, cell in enumerate(self.heads))
        shades = self.shades or [[0.0] * len(self.heads)] * len(self.rows)
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{_aligned(i, shade)}>{escape(cell)}</td>"
                for i, (cell, shade) in enumerate(zip(row, tint, strict=True))
            )
            + "</tr>"
            for row, tint in zip(self.rows, shades, strict=True)
        )
        caption = f"<caption>{escape(self.caption)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _aligned(column: int, shade: float = 0.0) -> str:
    colour = f"; background: rgba(0, 114, 178, {0.7 * shade:.2f})" if shade > 0 else ""
    return f' style="text-align: {"right" if column else "left"}{colour}"'


def markdown_table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, ending in a line break.

    >>> print(markdown_table(("name", "n"), [("a|b", 1)]), end="")
    | name | n |
    | --- | --- |
    | a\\|b | 1 |
    """
    lines = [[str(cell).replace("|", r"\|") for cell in line] for line in (heads, ["---"] * len(heads), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
