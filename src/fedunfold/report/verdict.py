"""What to use, what it gains, for whom it is worse and what it costs: one paragraph, computed from the records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedunfold.core.task import PrimaryMetric, finite
from fedunfold.report.grouping import BASELINE, Group, LabelledMethod
from fedunfold.report.noise import Gain, gain, signed, size
from fedunfold.report.text import counted, joined
from fedunfold.runs.schema import Floats

ALONE = "local"
MOST_NAMED = 3
WHERE = {"fedavg": "under fedavg", "alone": "alone"}
NOTHING = 1e-9  # rounding


@dataclass(frozen=True)
class WorseOff:
    """A client whose held-out score is lower under the method than under another.

    Attributes:
        client: Its name.
        than: "fedavg" or "alone", where it loses more.
        loss: How much worse its score is, fractions in percent.
        within_noise: Whether the 95 % interval of this loss has 0 in it.
    """

    client: str
    than: str
    loss: float
    within_noise: bool = False


@dataclass(frozen=True)
class Verdict:
    """Which method to use.

    Attributes:
        method: The federated one with the best mean score after the last round; references are none.
        score: This score, fractions in percent.
        within_noise: The others that it leads by no more than noise.
        cheapest: Of these and itself the one with the fewest rounds to learn; FedAvg, then the better one among equals.
        over_fedavg: What it gains over FedAvg; None where it is FedAvg, or FedAvg was not run.
        over_alone: What it gains over local training on what clients held out, as the mean of the clients; None where
            either is missing.
        fine_tuned_over_alone: The same of its models after every client has trained them further.
        worse_off: Clients with a lower held-out score than under FedAvg or alone, those beyond noise first, then the
            largest loss; None where nothing was held out, or nothing was run beside it.
        learning_rounds: How many rounds of the federation its weights took to learn.
        sentence: All of it in words.
    """

    method: str
    score: float
    within_noise: tuple[str, ...]
    cheapest: str
    over_fedavg: Gain | None
    over_alone: Gain | None
    fine_tuned_over_alone: Gain | None
    worse_off: tuple[WorseOff, ...] | None
    learning_rounds: int
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """Plain values; fractions in percent."""
        gains = {
            "over_fedavg": self.over_fedavg,
            "over_alone": self.over_alone,
            "fine_tuned_over_alone": self.fine_tuned_over_alone,
        }
        worse = None if self.worse_off is None else [vars(found) for found in self.worse_off]
        return {
            "sentence": self.sentence,
            "method": self.method,
            "score": finite(self.score),
            "within_noise": list(self.within_noise),
            "cheapest": self.cheapest,
            **{name: found and found.as_json() for name, found in gains.items()},
            "worse_off": worse,
            "learning_rounds": self.learning_rounds,
        }


def verdict(group: Group) -> Verdict | None:
    """The verdict on the methods of a group; None where no federated one has a score."""
    primary = group.first.primary
    ranked = [m for m in group.methods if not m.is_reference and np.isfinite(m.finals).all()]
    if not ranked:
        return None
    ranked.sort(key=lambda method: -primary.gain(float(method.finals.mean()), over=0.0))
    best, fedavg, alone = ranked[0], _named(group, BASELINE), _named(group, ALONE)
    gains = {other.label: final_gain(best, other, group) for other in ranked[1:]}
    close = [other for other in ranked[1:] if (found := gains[other.label]).half is not None and not found.is_known]
    cheapest = min((best, *close), key=lambda method: (learning_rounds(method), method.name != BASELINE))
    over_fedavg = gains.get(fedavg.label) if fedavg is not None else None
    over_alone = None if alone is None else _served(best, best.held_out, alone, group)
    tuned = None if alone is None else _served(best, best.fine_tuned, alone, group)
    rivals = [(n, m) for n, m in (("fedavg", fedavg), ("alone", alone)) if m is not None and m is not best]
    worse = _worse_off(best, rivals, group)
    names = tuple(other.label for other in close)
    sentences = [
        _use(best, ranked, close, cheapest, primary),
        *([] if over_fedavg is None else [_over_fedavg(over_fedavg, primary)]),
        *_over_alone(over_alone, tuned, primary),
        *_for_whom(best, worse, [WHERE[than] for than, _ in rivals], primary),
        _cost(best),
    ]
    return Verdict(
        best.label,
        float(best.finals.mean()),
        names,
        cheapest.label,
        over_fedavg,
        over_alone,
        tuned,
        worse,
        learning_rounds(best),
        " ".join(sentences),
    )


def final_gain(mine: LabelledMethod, theirs: LabelledMethod, group: Group) -> Gain:
    """How much better one method's final models are on the test set."""
    rows = [group.first.federation.test_samples]
    return gain(mine.finals, theirs.finals, group.first.primary, rows, paired=mine.run is theirs.run)


def learning_rounds(method: LabelledMethod) -> int:
    """How many rounds of the federation were spent on learning its weights."""
    learned = method.run.learned.get(method.name)
    return 0 if learned is None else len(learned.losses) * len(learned.weights)


def _named(group: Group, name: str) -> LabelledMethod | None:
    """The first method of that name; `local` may have settings behind it."""
    return next(
        (m for m in group.methods if m.name == name or (m.is_reference and m.name.startswith(f"{name} "))), None
    )


def _served(best: LabelledMethod, mine: Floats | None, alone: LabelledMethod, group: Group) -> Gain | None:
    if mine is None or alone.held_out is None:
        return None
    rows = [client.held_out for client in group.first.federation.clients]
    found = gain(mine, alone.held_out, group.first.primary, rows, paired=best.run is alone.run)
    return None if np.isnan(found.value) else found


def _worse_off(
    best: LabelledMethod, rivals: Sequence[tuple[str, LabelledMethod]], group: Group
) -> tuple[WorseOff, ...] | None:
    """Clients that lose, each with the larger of its losses."""
    tested = [(than, rival, rival.held_out) for than, rival in rivals if rival.held_out is not None]
    if best.held_out is None or not tested:
        return None
    primary, found = group.first.primary, []
    for k, client in enumerate(group.first.federation.clients):
        losses = [
            (gain(scores[:, k], best.held_out[:, k], primary, [client.held_out], paired=best.run is rival.run), than)
            for than, rival, scores in tested
        ]
        losses = [(loss, than) for loss, than in losses if loss.value > NOTHING]
        if losses:
            loss, than = max(losses, key=lambda each: each[0].value)
            noise = loss.half is not None and not loss.is_known
            found.append(WorseOff(group.first.clients[k], than, loss.value, noise))
    return tuple(sorted(found, key=lambda worse: (worse.within_noise, -worse.loss)))


# --- words -------------------------------------------------------------------------------------------------


def _use(
    best: LabelledMethod,
    ranked: Sequence[LabelledMethod],
    close: Sequence[LabelledMethod],
    cheapest: LabelledMethod,
    primary: PrimaryMetric,
) -> str:
    reached = f"{primary.text(float(best.finals.mean()))}{primary.unit()} test {primary.label}{primary.direction}"
    trials = f"{len(best.finals)} trial{'s' if len(best.finals) > 1 else ''}"
    if len(ranked) == 1:
        return f"{best.label} is the only federated method here: {reached} over {trials}."
    text = f"Use {best.label}: of {len(ranked)} federated methods it ends best, at {reached} over {trials}"
    if not close:
        return f"{text}."
    text += f"; its lead over {joined([other.label for other in close])} is within noise"
    if cheapest is best:
        return f"{text}, and none of these takes fewer rounds to learn."
    saved = learning_rounds(cheapest) < learning_rounds(best)
    cost = f", with {_rounds(cheapest)} to learn instead of {_rounds(best)}" if saved else ""
    return f"{text}. The cheapest of these is {cheapest.label}{cost}."


def _over_fedavg(found: Gain, primary: PrimaryMetric) -> str:
    if found.half is not None and not found.is_known:
        gained = signed(primary, found.value) + (" points" if primary.is_percentage else "")
        return f"Its gain of {gained} over fedavg is within noise ({found.interval(primary)})."
    return f"It is {size(primary, found.value)} better than fedavg ({found.interval(primary)})."


def _over_alone(found: Gain | None, tuned: Gain | None, primary: PrimaryMetric) -> Iterator[str]:
    if found is not None:
        yield f"On what clients held out it is, in the mean of the clients, {_than_alone(found, primary)}."
    if tuned is not None:
        yield f"Fine-tuned at each client, it is {_than_alone(tuned, primary)}."


def _than_alone(found: Gain, primary: PrimaryMetric) -> str:
    if found.value == 0 or (found.half is not None and not found.is_known):
        return f"within noise of local training ({found.interval(primary)})"
    how = "better" if found.value > 0 else "worse"
    return f"{size(primary, found.value)} {how} than local training ({found.interval(primary)})"


def _for_whom(
    best: LabelledMethod, worse: Sequence[WorseOff] | None, others: Sequence[str], primary: PrimaryMetric
) -> Iterator[str]:
    if best.held_out is None:
        yield "For whom it is worse is not known: clients held out nothing."
    elif worse:
        known, unsure = ([found for found in worse if found.within_noise is noise] for noise in (False, True))
        lost = f"Worse off on what they held out: {_listed(known, primary)}" if known else ""
        if not unsure:
            yield f"{lost}."
        elif known:
            yield f"{lost}; within noise also {_listed(unsure, primary)}."
        else:
            yield f"For no client is it worse by more than noise; within noise for {_listed(unsure, primary)}."
    elif worse is not None:
        yield f"No client does worse on what it held out than {' or '.join(others)}."


def _listed(worse: Sequence[WorseOff], primary: PrimaryMetric) -> str:
    """Who loses how much, the first few by name."""
    named = [
        f"{found.client} ({size(primary, found.loss)} worse than {WHERE[found.than]})" for found in worse[:MOST_NAMED]
    ]
    more = len(worse) - MOST_NAMED
    return joined([*named, f"{more} more"] if more > 0 else named)


def _cost(best: LabelledMethod) -> str:
    if learning_rounds(best):
        return f"Learning its weights takes {_rounds(best)} of the federation beforehand."
    return "It takes no rounds to learn weights."


def _rounds(method: LabelledMethod) -> str:
    return counted(learning_rounds(method), "round", "rounds")
