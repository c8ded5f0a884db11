"""What the records show, in sentences. Every number in them is computed from the run's own files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedunfold.core.task import PrimaryMetric
from fedunfold.report.grouping import Group, LabelledMethod
from fedunfold.report.text import capital
from fedunfold.runs.schema import FederationRecord, Floats, RunRecord

MOST_CLIENTS = 4
MOST_CLASSES = 6
SAME = 0.05  # points of accuracy that the shown digits cannot distinguish
SAME_PART = 0.0005  # the part of any other score


def findings(group: Group) -> list[str]:
    """Everything worth saying about runs of one federation, the outcome first."""
    found = [*_stopped(group), *_outcomes(group), *_rejected(group), *_classes(group), *_held_out(group)]
    found += [*_alone(group), *_served(group), *_left_out(group)]
    for run in group.runs:
        for name in run.learned:
            named = f"{name} · {run.label}" if len(group.runs) > 1 else name
            about = f"{named}: " if len(group.runs) > 1 or len(run.learned) > 1 else ""
            found += [about + sentence for sentence in (*_weights(run, name), *_outer_loss(run, name))]
    return [capital(sentence) if _is_own_word(sentence) else sentence for sentence in found]


def _is_own_word(sentence: str) -> bool:
    """Sentences that begin with a word of ours get a capital; names of methods stay as they are."""
    return sentence.startswith(("client ", "class ", "the ", "this ", "with "))


# --- how it ended ------------------------------------------------------------------------------------------


def _stopped(group: Group) -> Iterator[str]:
    for run in group.runs:
        if run.stopped:
            which = f"the run {run.label}" if len(group.runs) > 1 else "this run"
            yield f"{which} was stopped and is not finished: what had ended is shown, and it can be resumed."


def _outcomes(group: Group) -> Iterator[str]:
    if group.baseline is None:
        for method in group.methods:
            yield f"{method.label} ends at {ended(method)}{_named(group.first.primary)}{_few(method)}."
        return
    for method in group.others:
        yield _outcome(method, group.baseline)
        yield from _course(method, group.baseline)


def _outcome(method: LabelledMethod, base: LabelledMethod) -> str:
    mine, theirs, primary = method.finals, base.finals, method.run.primary
    difference = float(mine.mean() - theirs.mean())
    if _same(difference, primary, float(theirs.mean())):
        verdict = "no difference"
    else:
        size = primary.text(abs(difference)) + (" points" if primary.is_percentage else "")
        verdict = f"{size} {'more' if difference > 0 else 'less'}"
        if not primary.greater_is_better:
            verdict += f", which is {'worse' if difference > 0 else 'better'}"
        # Trial i of a run draws the same for every method, so that its trials are pairs.
        if method.run is base.run and len(mine) == len(theirs) > 1:
            verdict += f", better in {int((primary.gain(1, over=0) * (mine - theirs) > 0).sum())} of {len(mine)} trials"
    against = f"{ended(base)} of {base.label}{_named(primary)}"
    return f"{method.label} ends at {ended(method)} against {against}: {verdict}{_few(method)}."


def _course(method: LabelledMethod, base: LabelledMethod) -> Iterator[str]:
    """Whether the last round shows the same as those before it."""
    rounds, primary = min(method.scores.shape[1], base.scores.shape[1]), method.run.primary
    theirs = base.scores[:, :rounds].mean(0)
    lead = primary.gain(1, over=0) * (method.scores[:, :rounds].mean(0) - theirs)
    before, below, above = lead[:-1], "below", "above"
    if not primary.greater_is_better:
        below, above = above, below
    if _same(lead[-1], primary, theirs[-1]):
        return
    if lead[-1] > 0 and (behind := int((before < 0).sum())) > len(before) / 2:
        yield (
            f"{method.label} lies {below} {base.label} in {behind} of {rounds} rounds and {above} it in the last: "
            "it is the final model that gains."
        )
    elif lead[-1] < 0 and (ahead := int((before > 0).sum())) > len(before) / 2:
        yield f"{method.label} lies {above} {base.label} in {ahead} of {rounds} rounds, but ends {below} it."


def ended(method: LabelledMethod) -> str:
    """The primary metric of the final models, with their spread (n − 1) over the trials."""
    finals, primary = method.finals, method.run.primary
    mean = float(finals.mean())
    shown = primary.spread(mean, float(finals.std(ddof=1))) if len(finals) > 1 else primary.text(mean)
    return shown + primary.unit()


def _named(primary: PrimaryMetric) -> str:
    """What a score is, where it is no accuracy."""
    return "" if primary.is_accuracy else f" ({primary.label}{primary.direction})"


def _same(difference: float, primary: PrimaryMetric, value: float) -> bool:
    """Whether the shown digits cannot distinguish two scores."""
    return abs(difference) < (SAME if primary.is_percentage else SAME_PART * abs(value))


def _few(method: LabelledMethod) -> str:
    return " (a single trial: how much it varies is not known)" if len(method.finals) == 1 else ""


# --- who gains and who loses -------------------------------------------------------------------------------


def _rejected(group: Group) -> Iterator[str]:
    """Clients whose updates were rejected, under each method; the most often first."""
    for method in group.methods:
        under = f" under {method.label}" if len(group.methods) > 1 else ""
        trials = f" of {len(method.scores)} trials" if len(method.scores) > 1 else ""
        for found in method.rejected[:MOST_CLIENTS]:
            rounds = f"{found.times} of {method.scores.size} rounds{trials}"
            yield f"client {found.client} was rejected in {rounds}{under}: it {found.reason}."
        if (more := len(method.rejected) - MOST_CLIENTS) > 0:
            those = _count(more, "more client was", "more clients were")
            yield f"{those} rejected{under}, no more often than these."


def _classes(group: Group) -> Iterator[str]:
    base = group.baseline
    for method in group.others:
        mine = method.class_accuracy.mean(0)
        if np.isnan(mine).all():
            continue
        if base is None:
            weakest = int(np.nanargmin(mine))
            share = f"{mine[weakest]:.1f} % of its test samples right"
            yield f"class {group.first.classes[weakest]} is the weakest of {method.label}: {share}."
            continue
        theirs = base.class_accuracy.mean(0)
        change = mine - theirs
        gains, losses = int((change > SAME).sum()), int((change < -SAME).sum())
        text = f"with {method.label} against {base.label}, {_count(gains, 'class gains', 'classes gain')} and "
        text += _count(losses, "loses", "lose")
        most = [(int(np.nanargmax(change)), "gains")] if gains else []
        most += [(int(np.nanargmin(change)), "loses")] if losses else []
        parts = [f"class {group.first.classes[c]} {verb} most, {theirs[c]:.1f} → {mine[c]:.1f} %" for c, verb in most]
        yield f"{text}{'; ' if parts else ''}{'; '.join(parts)}."


def _held_out(group: Group) -> Iterator[str]:
    """How the final models do on what clients held out."""
    primary = group.first.primary
    about = f"the mean of the clients' {primary.label} on what they held out"
    for method in group.methods:
        for label, scores in ((method.label, method.held_out), (f"{method.label}, fine-tuned", method.fine_tuned)):
            if scores is not None and (found := _mean_and_worst(group, scores.mean(0))):
                yield f"with {label}, {about} is {found}."


def _alone(group: Group) -> Iterator[str]:
    """How many clients do better with a model of their own rows alone than with the best of the federated ones."""
    federated = [
        (label, scores.mean(0))
        for method in group.methods
        for label, scores in ((method.label, method.held_out), (f"{method.label}, fine-tuned", method.fine_tuned))
        if scores is not None and not method.is_reference and not np.isnan(scores.mean(0)).all()
    ]
    if not federated:
        return
    primary = group.first.primary
    best, theirs = max(federated, key=lambda found: primary.gain(float(np.nanmean(found[1])), over=0))
    for method in group.methods:
        if method.is_reference and method.name.startswith("local") and method.held_out is not None:
            better = int((primary.gain(1, over=0) * (method.held_out.mean(0) - theirs) > 0).sum())
            mean = f"{primary.text(float(np.nanmean(theirs)))}{primary.unit()}"
            against = f"{best}, which has the best mean of the federated ones, {mean}"
            clients = f"{better} of {len(theirs)} clients do better on what they held out"
            yield f"with {method.label}, {clients} than with {against}."


def _left_out(group: Group) -> Iterator[str]:
    """How models do on a client without which they were trained."""
    for run in group.runs:
        for name, scores in run.left_out.items():
            if found := _mean_and_worst(group, scores):
                label = f"{name} · {run.label}" if len(group.runs) > 1 else name
                about = f"the mean of the clients' {run.primary.label}, each of models trained without it,"
                yield f"with {label}, {about} is {found}."


def _mean_and_worst(group: Group, scores: Floats) -> str:
    """Of all clients, the second with its name; empty where none is known."""
    if np.isnan(scores).all():
        return ""
    primary = group.first.primary
    worst = int(np.nanargmin(scores) if primary.greater_is_better else np.nanargmax(scores))
    mean, low = (f"{primary.text(float(value))}{primary.unit()}" for value in (np.nanmean(scores), scores[worst]))
    return f"{mean}, and the worst {low} at {group.first.clients[worst]}"


def _served(group: Group) -> Iterator[str]:
    """The client for which the final model is worst."""
    base, primary = group.baseline, group.first.primary
    shown = [*group.others] if base is None else [base, *group.others]
    each = []
    for method in shown:
        worst = worst_client(method)
        if worst is None:
            continue
        others = f" and {worst.others} more" if worst.others else ""
        score = f"{primary.text(worst.score)}{primary.unit()}"
        each.append(f"{group.first.clients[worst.client]}{others} with {score} under {method.label}")
    if each:
        by = f"the final model's {primary.label} on its own training data"
        yield f"the worst-served client, by {by}, is {'; '.join(each)}."


@dataclass(frozen=True)
class Worst:
    """The worst-served client.

    Attributes:
        client: The first with the worst score on its own training data, as a mean of the trials.
        score: This score.
        others: How many others have it too.
    """

    client: int
    score: float
    others: int


def worst_client(method: LabelledMethod) -> Worst | None:
    """The worst-served client; None where no client's score is known."""
    means = method.client_scores.mean(0)
    if np.isnan(means).all():
        return None
    worst = int(np.nanargmin(means) if method.run.primary.greater_is_better else np.nanargmax(means))
    return Worst(worst, float(means[worst]), int((means == means[worst]).sum()) - 1)


# --- what the weights show ---------------------------------------------------------------------------------


def _weights(run: RunRecord, name: str) -> Iterator[str]:
    """Clients that alone hold a class; where there is none, those that moved furthest from their size."""
    weights = run.learned[name].weights.numpy()
    shares = run.federation.shares
    shift = weights.mean(0) - np.array(shares)
    alone = only_holders(run.federation)
    for k in sorted(alone, key=lambda k: -abs(shift[k]))[:MOST_CLIENTS]:
        held = _listed([run.classes[c] for c in alone[k]])
        yield f"client {run.clients[k]} holds the only samples of {held} and {_counts(weights, shares, k)}."
    if len(alone) > MOST_CLIENTS:
        yield f"{len(alone) - MOST_CLIENTS} more clients hold classes that nobody else has; their weights moved less."
    if not alone and abs(shift).max() > 0:
        for k, how in ((int(shift.argmax()), "lifted furthest above"), (int(shift.argmin()), "held furthest below")):
            client = f"client {run.clients[k]}{_circumstances(run.federation, k)}"
            yield f"{client} is {how} its size: it {_counts(weights, shares, k)}."


def only_holders(federation: FederationRecord) -> dict[int, tuple[int, ...]]:
    """The classes that a single client has samples of, by that client."""
    alone: dict[int, tuple[int, ...]] = {}
    for label in range(federation.classes if federation.classes > 1 else 0):
        holders = [k for k, client in enumerate(federation.clients) if client.label_counts[label]]
        if len(holders) == 1:
            alone[holders[0]] = (*alone.get(holders[0], ()), label)
    return alone


def _counts(weights: Floats, shares: Sequence[float], k: int) -> str:
    mean, last = float(weights[:, k].mean()), float(weights[-1, k])
    against = f"against {weight(shares[k])} by size"
    return f"counts {weight(mean)} on average over the rounds, {weight(last)} in the last, {against}"


def _circumstances(federation: FederationRecord, k: int) -> str:
    """What sets a client apart from the others, where something does."""
    client = federation.clients[k]
    parts = []
    if len({other.participation_probability for other in federation.clients}) > 1:
        parts.append(f"reachable in {100 * client.participation_probability:.0f} % of the rounds")
    if len({other.epochs for other in federation.clients}) > 1:
        parts.append(f"{epochs_of(client.epochs)} a round")
    return f" ({', '.join(parts)})" if parts else ""


def _outer_loss(run: RunRecord, name: str) -> Iterator[str]:
    losses = run.learned[name].losses.numpy()
    if len(losses) < 2:
        return
    first, last, lowest = float(losses[0]), float(losses[-1]), int(losses.argmin())
    verb = "fell" if last < first else "rose" if last > first else "stayed"
    text = f"the outer loss {verb} from {loss_in_words(first)} to {loss_in_words(last)} in {len(losses)} iterations"
    if losses[lowest] < last - 0.001 * abs(last):
        text += f", and was lowest at iteration {lowest + 1} with {loss_in_words(float(losses[lowest]))}"
    yield f"{text}."


# --- words -------------------------------------------------------------------------------------------------


def weight(value: float) -> str:
    """A weight with two digits that mean something.

    >>> weight(0.314), weight(0.00492), weight(0.0000002)
    ('0.31', '0.0049', 'less than 0.001')
    """
    return "less than 0.001" if value < 0.001 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def epochs_of(epochs: int | Sequence[int]) -> str:
    """
    >>> epochs_of(1), epochs_of((1, 3, 2))
    ('1 epoch', '1 to 3 epochs')
    """
    few, many = (epochs, epochs) if isinstance(epochs, int) else (min(epochs), max(epochs))
    return f"{few} to {many} epochs" if few < many else f"{few} epoch{'s' if few > 1 else ''}"


def loss_in_words(value: float) -> str:
    """
    >>> loss_in_words(53561.2), loss_in_words(0.123456)
    ('53,561', '0.1235')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number or 'no'} {one if number == 1 else several}"


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["ill"]), _listed("29"), _listed("abcdefghijkl")
    ('class ill', 'classes 2 and 9', 'classes a, b, c, d, e, f and 6 more')
    """
    if len(names) == 1:
        return f"class {names[0]}"
    if len(names) > MOST_CLASSES:
        names = [*names[:MOST_CLASSES], f"{len(names) - MOST_CLASSES} more"]
    return f"classes {', '.join(names[:-1])} and {names[-1]}"
