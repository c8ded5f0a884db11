"""What the records show, in sentences. Every number in them is computed from the run's own files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedunfold.core.task import ACCURACY, PrimaryMetric
from fedunfold.report.grouping import Group, LabelledMethod
from fedunfold.report.learning import on_learning
from fedunfold.report.noise import gain
from fedunfold.report.text import capital, counted
from fedunfold.report.verdict import final_gain
from fedunfold.report.warnings import warnings
from fedunfold.runs.schema import Floats

FEW = 6  # findings that are not folded away
SAME = 0.05  # points of accuracy that the shown digits cannot distinguish
SAME_PART = 0.0005  # the part of any other score


@dataclass(frozen=True)
class Ranked:
    """What the records show, in the order of how much it matters.

    Attributes:
        warnings: What a reader has to know before all else.
        first: The largest effects beyond noise, the largest first; where no method was tested, the first of all.
        more: Everything else.
    """

    warnings: tuple[str, ...]
    first: tuple[str, ...]
    more: tuple[str, ...]


def ranked(group: Group) -> Ranked:
    """Everything worth saying about runs of one federation.

    An effect is a difference in half-widths of its 95 % interval (`noise.Gain`): what is not above 1 may be noise.
    Facts without one, such as weights and losses, follow.
    """
    found = sorted(_all(group), key=lambda effect_and_text: -effect_and_text[0])
    shown = min(sum(effect > 1 for effect, _ in found) if group.methods else FEW, FEW)
    texts = [capital(text) if _is_own_word(text) else text for _, text in found]
    return Ranked(tuple(warnings(group)), tuple(texts[:shown]), tuple(texts[shown:]))


def findings(group: Group) -> list[str]:
    """All of it, the most important first."""
    found = ranked(group)
    return [*found.warnings, *found.first, *found.more]


def _all(group: Group) -> Iterator[tuple[float, str]]:
    """Sentences with their effects."""
    yield from _outcomes(group)
    yield from _classes(group)
    for text in (*_courses(group), *_held_out(group), *_alone(group), *_served(group), *_left_out(group)):
        yield 0.0, text
    for text in on_learning(group):
        yield 0.0, text


def _is_own_word(sentence: str) -> bool:
    """Sentences that begin with a word of ours get a capital; names of methods stay as they are."""
    return sentence.startswith(("client ", "class ", "the ", "with "))


# --- how it ended ------------------------------------------------------------------------------------------


def _outcomes(group: Group) -> Iterator[tuple[float, str]]:
    """How every method ended; what a reference reaches is no effect of a method."""
    base = group.baseline
    if base is None:
        for method in group.methods:
            yield math.inf, f"{method.label} ends at {ended(method)}{_named(group.first.primary)}{_few(method)}."
        return
    for method in group.others:
        effect = 0.0 if method.is_reference else final_gain(method, base, group).effect
        yield effect, _outcome(method, base)


def _courses(group: Group) -> Iterator[str]:
    if (base := group.baseline) is not None:
        for method in group.others:
            yield from _course(method, base)


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


def _classes(group: Group) -> Iterator[tuple[float, str]]:
    """Who gains and who loses most, with the larger of the two as the effect, against the noise of the largest of all
    classes: each is taken to have an equal part of the test set."""
    base, federation = group.baseline, group.first.federation
    rows = [federation.test_samples / federation.classes]
    for method in group.others:
        mine = method.class_accuracy.mean(0)
        if np.isnan(mine).all():
            continue
        if base is None:
            weakest = int(np.nanargmin(mine))
            share = f"{mine[weakest]:.1f} % of its test samples right"
            yield 0.0, f"class {group.first.classes[weakest]} is the weakest of {method.label}: {share}."
            continue
        theirs = base.class_accuracy.mean(0)
        change = mine - theirs
        gains, losses = int((change > SAME).sum()), int((change < -SAME).sum())
        text = f"with {method.label} against {base.label}, {counted(gains, 'class gains', 'classes gain')} and "
        text += counted(losses, "loses", "lose")
        most = [(int(np.nanargmax(change)), "gains")] if gains else []
        most += [(int(np.nanargmin(change)), "loses")] if losses else []
        noise: dict[str, Any] = {"paired": method.run is base.run, "largest_of": int((~np.isnan(change)).sum())}
        effects = [
            gain(method.class_accuracy[:, c], base.class_accuracy[:, c], ACCURACY, rows, **noise).effect
            for c, _ in most
        ]
        effect = 0.0 if method.is_reference else max(effects, default=0.0)
        parts = [f"class {group.first.classes[c]} {verb} most, {theirs[c]:.1f} → {mine[c]:.1f} %" for c, verb in most]
        yield effect, f"{text}{'; ' if parts else ''}{'; '.join(parts)}."


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
