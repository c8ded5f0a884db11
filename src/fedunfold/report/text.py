"""Labels as charts show them."""

import html
from collections.abc import Sequence

from fedunfold.runs.labels import distinct

SHORT = 18


def shortened(labels: Sequence[str]) -> tuple[str, ...]:
    """As much of each as an axis has room for, still distinct.

    >>> shortened(["melanoma", "squamous cell carcinoma"])
    ('melanoma', 'squamous cell car…')
    """
    return distinct([label if len(label) <= SHORT else label[: SHORT - 1] + "…" for label in labels])


def capital(text: str) -> str:
    """With a capital.

    >>> capital("accuracy"), capital("R² of doses")
    ('Accuracy', 'R² of doses')
    """
    return text[:1].upper() + text[1:]


def counted(number: int, one: str, several: str) -> str:
    """A number of things.

    >>> counted(0, "class", "classes"), counted(1, "class", "classes")
    ('no classes', '1 class')
    """
    return f"{number or 'no'} {one if number == 1 else several}"


def joined(names: Sequence[str]) -> str:
    """
    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def escaped(label: str) -> str:
    """A label inside a chart, where Plotly would read tags of its own.

    >>> escaped("<b>site</b>")
    '&lt;b&gt;site&lt;/b&gt;'
    """
    return html.escape(label, quote=False)
