"""Charts as Plotly reads them: plain data, drawn in the browser.

Colours are names of the page's own (`var(--…)`, with two digits of opacity where they follow), so that light and dark
are decided there. All text from a folder passes through `escaped`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.report.grouping import Group
from fedunfold.report.text import escaped
from fedunfold.runs.schema import FederationRecord, Floats, RunRecord

Chart = dict[str, Any]

COLOURS = 6
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
RAMP = [[part / 3, f"var(--ramp-{part})"] for part in range(4)]
FEW = 10
WORST = 0.05  # of the scores, which may lie outside of a chart until a double click shows all
ROOM = 0.08  # of a part of an axis, on either side
LEAST_POINTS = 10.0
MARKED = 40  # points of a line that still get a mark each


def scores(group: Group) -> Chart:
    """The test's primary metric after every round: the mean of the trials, shaded by one standard deviation."""
    traces, primary = [], group.first.primary
    for i, method in enumerate(group.methods):
        values = method.scores
        rounds = list(range(1, values.shape[1] + 1))
        mean = values.mean(0)
        if len(values) > 1:
            sd = values.std(0, ddof=1)
            band = [*(mean + sd), *(mean - sd)[::-1]]
            traces.append(_band([*rounds, *rounds[::-1]], band, i))
        traces.append(_line(rounds, mean, method.label, i, f"round %{{x}}: {_value(primary)}"))
    chart = _chart(traces, x="round", y=f"test {on_axis(primary)}", legend=True)
    chart["layout"]["xaxis"] |= _every(max(method.scores.shape[1] for method in group.methods))
    chart["layout"]["yaxis"] |= _later_rounds(group)
    return chart


def _later_rounds(group: Group) -> Chart:
    """The part of the axis where the scores after the first fifth of the rounds lie, but for the worst twentieth.

    How methods differ is seen there, and not in how all of them begin, nor in how far off `majority` is, which trains
    nothing.
    """
    trained = [method for method in group.methods if not (method.is_reference and method.name == "majority")]
    each = [method.scores[:, method.scores.shape[1] // 5 :].ravel() for method in trained or group.methods]
    values = np.concatenate(each)
    values = values[np.isfinite(values)]
    if not len(values):
        return {}
    greater = group.first.primary.greater_is_better
    low, high = np.quantile(values, [WORST, 1] if greater else [0, 1 - WORST]).tolist()
    room = ROOM * (high - low)
    return {"range": [_rounded(low - room), _rounded(high + room)]} if room > 0 else {}


def outer_loss(run: RunRecord) -> Chart:
    """The outer loss at every iteration, of all that was learned in a run."""
    traces = [
        _line(list(range(1, len(learned.losses) + 1)), learned.losses.numpy(), name, i, "iteration %{x}: %{y:.5g}")
        for i, (name, learned) in enumerate(run.learned.items())
    ]
    chart = _chart(traces, x="outer iteration", y="outer loss", legend=len(traces) > 1, height=320)
    chart["layout"]["xaxis"] |= _every(max(len(learned.losses) for learned in run.learned.values()))
    return chart


def labels_held(federation: FederationRecord, clients: Sequence[str], classes: Sequence[str]) -> Chart:
    """How many samples of each class each client holds; nothing where it has none.

    Args:
        federation: Who holds what.
        clients: The clients' labels.
        classes: The classes' labels.
    """
    counts = [[count or None for count in client.label_counts] for client in federation.clients]
    most = max(max(client.label_counts) for client in federation.clients)
    trace = _heatmap(counts, clients, [escaped(name) for name in classes], "%{y}, class %{x}: %{z} samples", "samples")
    chart = _grid({**trace, "zmin": 0, "zmax": most}, clients, "class")
    chart["layout"]["xaxis"]["type"] = "category"  # names may look like numbers
    del chart["layout"]["xaxis"]["tickangle"]  # and may be long: turned where they need it
    if most <= FEW:
        chart["data"][0]["colorbar"] |= {"dtick": 1 + most // 5}  # no halves of a sample
    return chart


def weights(clients: Sequence[str], rounds: int, most: float) -> Chart:
    """How much each client counts in each round; what is in it comes frame by frame.

    Args:
        clients: The clients' labels.
        rounds: T.
        most: The weight with the strongest colour.
    """
    trace = _heatmap([], clients, range(1, rounds + 1), "%{y}, round %{x}: %{z:.3f}", "weight")
    return _grid({**trace, "zmin": 0, "zmax": most}, clients, "round")


def before_and_after(
    names: Sequence[str],
    before: Floats | None,
    after: Floats,
    labels: tuple[str, str],
    *,
    x: str,
    metric: PrimaryMetric = ACCURACY,
) -> Chart:
    """A mark for each of two methods, joined by a line that says who gains and who loses.

    Many are shown in the order of the first method, from the worst to the best.

    Args:
        names: Of classes or clients.
        before: Scores of the first method; None where there is one method.
        after: Scores of the second.
        labels: The methods' labels.
        x: What the names are of.
        metric: What the scores are.
    """
    if len(names) > MARKED:
        order = np.argsort(after if before is None else before, kind="stable")
        names, after = [names[i] for i in order], after[order]
        before = None if before is None else before[order]
    places = [escaped(name) for name in names]
    traces: list[Chart] = []
    if before is not None:
        for gains, colour, name in ((True, "var(--gain)", "gains"), (False, "var(--loss)", "loses")):
            ends: list[list[Any]] = [[], []]
            for place, old, new in zip(places, before, after, strict=True):
                if metric.gain(new, over=old) > 0 if gains else metric.gain(new, over=old) < 0:
                    ends[0] += [place, place, None]
                    ends[1] += [old, new, None]
            line = {"color": colour, "width": 5 if len(places) <= MARKED else 2}
            traces.append(_trace(ends[0], ends[1], name, mode="lines", line=line, hoverinfo="skip"))
        ring = {"symbol": "circle-open", "color": "var(--muted)", "size": _mark(places), "line": {"width": 2}}
        traces.append(_marks(places, before, labels[0], ring, metric))
    traces.append(_marks(places, after, labels[1], {"color": "var(--series-0)", "size": _mark(places)}, metric))
    chart = _chart(traces, x=x, y=on_axis(metric), legend=before is not None)
    chart["layout"]["xaxis"] |= {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": places,
        "range": [-0.7, len(places) - 0.3],
    }
    if metric.is_percentage:
        together = after if before is None else np.concatenate([before, after])
        chart["layout"]["yaxis"] |= {"range": _percentages(together)}
    return chart


def _percentages(values: Floats) -> list[float | None]:
    """The part of an axis where percentages lie, with room; at least 10 points, for less makes noise look large."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 100.0)
    lacking = max(0.0, LEAST_POINTS - (high - low)) / 2
    low, high = low - lacking, high + lacking
    moved = min(0.0, 100 - high) - min(0.0, low)  # no room is spent on what no percentage is
    low, high = low + moved, high + moved
    room = ROOM * (high - low)
    return [_rounded(low - room), _rounded(high + room)]


def on_axis(metric: PrimaryMetric) -> str:
    """What an axis of scores is called.

    >>> on_axis(ACCURACY), on_axis(PrimaryMetric("rmse", False, frozenset()))
    ('accuracy (%)', 'RMSE, lower is better')
    """
    return f"{metric.label}{metric.brackets()}{metric.direction}"


def _value(metric: PrimaryMetric) -> str:
    """A score under the mouse."""
    return "%{y:.1f} %" if metric.is_percentage else "%{y:.4g}"


def _mark(places: Sequence[str]) -> int:
    return 10 if len(places) <= MARKED else 5


def _marks(places: Sequence[str], values: Floats, name: str, marker: Chart, metric: PrimaryMetric) -> Chart:
    return _trace(places, values, name, mode="markers", marker=marker, hovertemplate=f"%{{x}}: {_value(metric)}")


def _line(x: Sequence[int], y: Floats, name: str, index: int, hover: str) -> Chart:
    return _trace(
        x,
        y,
        name,
        mode="lines+markers" if len(x) <= MARKED else "lines",
        line={"color": _colour(index), "width": 2.5, "dash": DASHES[index % len(DASHES)]},
        marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
        hovertemplate=hover,
        legendgroup=str(index),
    )


def _band(x: Sequence[int], y: Sequence[float], index: int) -> Chart:
    fill = {"fill": "toself", "fillcolor": f"{_colour(index)}2b", "hoverinfo": "skip", "showlegend": False}
    return _trace(x, y, "", mode="none", legendgroup=str(index), **fill)


def _colour(index: int) -> str:
    return f"var(--series-{index % COLOURS})"


def _trace(x: Sequence[Any], y: Iterable[float | None], name: str, **more: Any) -> Chart:
    return {"type": "scatter", "x": list(x), "y": [_rounded(value) for value in y], "name": escaped(name), **more}


def _heatmap(z: Sequence[Any], clients: Sequence[str], x: Sequence[int | str], hover: str, unit: str) -> Chart:
    return {
        "type": "heatmap",
        "x": list(x),
        "y": [escaped(client) for client in clients],
        "z": z,
        "colorscale": RAMP,
        "xgap": 1 if len(x) <= MARKED else 0,
        "ygap": 1 if len(clients) <= MARKED else 0,
        "hovertemplate": f"{hover}<extra></extra>",
        "hoverongaps": False,
        "colorbar": {"title": {"text": unit, "side": "right"}, "thickness": 12, "outlinewidth": 0},
    }


def _every(count: int) -> Chart:
    """A mark for each of a few numbers; as many as fit otherwise."""
    return {"tickangle": 0, "dtick": 1} if count <= FEW else {"tickangle": 0}


def _grid(trace: Chart, clients: Sequence[str], x: str) -> Chart:
    chart = _chart([trace], x=x, y="", legend=False, height=min(140 + 28 * len(clients), 620))
    chart["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed", "showgrid": False, "ticks": ""}
    chart["layout"]["xaxis"] |= _every(len(trace["x"]))
    return chart


def _chart(traces: Sequence[Chart], *, x: str, y: str, legend: bool, height: int = 400) -> Chart:
    axis = {"automargin": True, "gridcolor": "var(--grid)", "linecolor": "var(--muted)", "zeroline": False}
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": "var(--text)", "size": 13},
            "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--muted)", "font": {"color": "var(--text)"}},
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "hovermode": "closest",
            "xaxis": {**axis, "title": {"text": x}, "showgrid": False, "tickformat": "d"},
            "yaxis": {**axis, "title": {"text": y}},
        },
    }


def _rounded(value: float | None) -> float | None:
    """Digits beyond those shown only make the file larger."""
    return None if value is None or np.isnan(value) else float(f"{value:.6g}")
