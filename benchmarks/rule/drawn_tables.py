"""The parts of the page on many drawn federations: held-out ones, bad clients, the ablation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from benchmarks.held_out import ORDER
from benchmarks.rule.entrants import FEATURES, RULE
from benchmarks.rule.records import Record
from benchmarks.rule.sections import BAD, COMPLETE, SECTIONS
from benchmarks.rule.statistics import TIE, clustered, percentile, win_rate
from benchmarks.rule.view import Bar, Part, View, in_order
from fedunfold.studies.benchmark.markdown import spread, table
from fedunfold.studies.benchmark.statistics import interval

ENOUGH_ROWS = 1000
WIN_BAR = 0.85
WORST_BAR = -1.0


def held_out(records: Sequence[Record]) -> Part:
    """Federations on data that no rule was learned on."""
    view = View(records, SECTIONS["held-out"].last)
    small = {record.environment for record in records if record.about.get("test_rows", 0) < ENOUGH_ROWS}
    groups = {
        f"{ENOUGH_ROWS} test rows or more": [name for name in view.environments if name not in small],
        f"fewer than {ENOUGH_ROWS} test rows": [name for name in view.environments if name in small],
    }
    bars, numbers, texts = [], {}, []
    for title, environments in groups.items():
        gains = {method: _gains(view, environments, method) for method in [*_rivals(view), RULE]}
        rows = [[method, *_summary(found)] for method, found in gains.items() if found]
        if not rows:
            continue
        heads = ["method", "federations", "mean gain", "win rate", "5th percentile", "least"]
        texts.append(f"### Federations with {title}\n\n{table(heads, rows)}")
        if not (ours := gains[RULE]):
            continue
        means = [fmean(trials) for trials in ours.values()]
        hindsight = _over_best(view, environments)
        found = {
            "federations": len(means),
            "mean gain": clustered(ours).as_json(),
            "win rate": win_rate(means),
            "5th percentile": percentile(means, 5),
            "win rate over the best rival in hindsight": win_rate(hindsight) if hindsight else None,
        }
        numbers[title] = found
        if hindsight:
            texts.append(
                f"Against the best of all rivals, chosen for each federation in hindsight, the rule wins "
                f"{100 * win_rate(hindsight):.0f} % and gains {interval(hindsight).text()}.\n"
            )
        if environments and environments[0] not in small:
            mean, wins, worst = clustered(ours), win_rate(means), percentile(means, 5)
            bars += [
                Bar(f"mean gain over FedAvg {mean.text()}, above 0.", mean.low > 0),
                Bar(f"win rate {100 * wins:.1f} %, at least {100 * WIN_BAR:.0f} %.", wins >= WIN_BAR),
                Bar(f"5th percentile of the gains {worst:+.2f}, at least {WORST_BAR:g}.", worst >= WORST_BAR),
            ]
    rows = [[method, *_times(records, method)] for method in [*_rivals(view), RULE]]
    text = (
        "`benchmarks/held_out.py` draws them. A score is the mean of the last three rounds, a federation's gain over "
        f"FedAvg the mean of its paired trials; intervals are over the federations. Within {TIE:g} points is a tie and "
        f"counts half a win. {_data(records)}\n\n" + "\n".join(texts) + "\n### Seconds of a run\n\n"
        f"{table(['method', 'median', 'largest'], [row for row in rows if row[1] != '–'])}"
    )
    return Part("Federations on data that no rule was learned on", text, bars, numbers)


def _data(records: Sequence[Record]) -> str:
    """Of which data there are how many federations."""
    data = {record.environment: record.about["data"] for record in records}
    listed = ", ".join(f"{name} {count}" for name, count in sorted(Counter(data.values()).items()))
    without = sorted(set(ORDER) - set(data.values()))
    return f"Federations: {listed}." + (f" Without records: {', '.join(without)}." if without else "")


def _rivals(view: View) -> list[str]:
    found = dict.fromkeys(method for name in view.environments for method in view.methods(name))
    return sorted(method for method in found if method != RULE)


def _gains(view: View, environments: Sequence[str], method: str) -> dict[str, list[float]]:
    if method == "fedavg":
        return {}
    found = {name: view.gains(name, method, "fedavg") for name in environments}
    return {name: gains for name, gains in found.items() if gains}


def _summary(gains: Mapping[str, Sequence[float]]) -> list[str]:
    means = [fmean(trials) for trials in gains.values()]
    wins, worst = f"{100 * win_rate(means):.1f} %", f"{percentile(means, 5):+.2f}"
    return [str(len(means)), clustered(gains).text(), wins, worst, f"{min(means):+.2f}"]


def _over_best(view: View, environments: Sequence[str]) -> list[float]:
    found = [view.against_best(name) for name in environments]
    return [gain.mean for pair in found if pair for gain in pair[1:]]


def _times(records: Sequence[Record], method: str) -> list[str]:
    seconds = [record.seconds for record in records if record.method == method]
    return [f"{median(seconds):.2f}", f"{max(seconds):.1f}"] if seconds else ["–", "–"]


def bad_clients(records: Sequence[Record]) -> Part:
    """Clients from which nothing can be learned, or that harm."""
    view = View(records, SECTIONS["bad-clients"].last)
    rows, numbers, bars = [], {}, []
    for name in in_order(view.environments, BAD):
        data, kind, count = name.rsplit("-", 2)
        gains = view.gains(name, RULE, "fedavg")
        found = interval(gains) if gains else None
        scores = [spread(view.scores(name, method)) for method in ("fedavg", RULE)]
        rows.append([f"{data}, {count} with bad {kind}", *scores, found.text() if found else "–"])
        if found:
            numbers[name] = found.as_json()
            bars.append(Bar(f"{name}: {found.text()} over FedAvg, not below it beyond noise.", found.high >= 0))
    text = (
        "Ten clients with unlike shares of the classes, of which one or two are bad: their labels are reversed (y "
        "becomes C − 1 − y), their inputs are noise with the mean and deviation of each feature, or their updates have "
        "the wrong sign. Score: mean of the last three rounds.\n\n"
        f"{table(['federation', 'fedavg', RULE, 'difference'], rows)}"
    )
    return Part("Bad clients", text, bars, numbers)


def ablation(records: Sequence[Record]) -> Part:
    """What the rule loses without one thing that it sees or decides."""
    view = View(records, SECTIONS["ablation"].last)
    numbers: dict[str, list[float | None]] = {}
    lacking = [f"{RULE} without {feature}" for feature in FEATURES]
    found = in_order((method for name in view.environments for method in view.methods(name)), (*lacking, COMPLETE))
    losses = {}
    for method in found:
        values = [fmean(gains) for name in view.environments if (gains := view.gains(name, RULE, method))]
        if method != RULE and values:
            losses[method] = interval(values)
    ordered = sorted(losses, key=lambda method: -losses[method].mean)
    numbers = {method: losses[method].as_json() for method in ordered}
    rows = [[method if method.startswith(RULE) else f"over {method}", losses[method].text()] for method in ordered]
    text = (
        f"On {len(view.environments)} federations of the distribution that the rule is learned on, others than those: "
        "how many points the complete rule is ahead of the rule that lacks something, with 95 % intervals. A feature "
        f"that is lacking has its neutral value. `{COMPLETE}` is the rule's server with weights by size; `formula` and "
        "`private` are the other rules that come with the package.\n\n"
        f"{table(['method', 'the complete rule is ahead by'], rows)}"
    )
    return Part("What each feature and each part of the decision brings", text, (), numbers)
