"""What a reader has to know before all else: runs cut short, updates rejected, clients that the weights silence."""

from collections.abc import Iterator

from fedunfold.report.grouping import Group
from fedunfold.report.text import capital, counted

LEAST_SHARE = 0.05
SILENT = 0.2  # of its share of the samples
MOST_OF_ALL = 0.9
MOST_NAMED = 3
MOST_REJECTED = 4


def warnings(group: Group) -> list[str]:
    """All of them, those about the run first."""
    # Sentences that begin with a word of ours get a capital; names of methods stay as they are.
    return [*map(capital, (*_stopped(group), *_rejected(group))), *silenced(group)]


def _stopped(group: Group) -> Iterator[str]:
    for run in group.runs:
        if run.stopped:
            which = f"the run {run.label}" if len(group.runs) > 1 else "this run"
            yield f"{which} was stopped and is not finished: what had ended is shown, and it can be resumed."


def _rejected(group: Group) -> Iterator[str]:
    """Clients whose updates were rejected, under each method; the most often first."""
    for method in group.methods:
        under = f" under {method.label}" if len(group.methods) > 1 else ""
        trials = f" of {len(method.scores)} trials" if len(method.scores) > 1 else ""
        for found in method.rejected[:MOST_REJECTED]:
            rounds = f"{found.times} of {method.scores.size} rounds{trials}"
            yield f"client {found.client} was rejected in {rounds}{under}: it {found.reason}."
        if (more := len(method.rejected) - MOST_REJECTED) > 0:
            those = counted(more, "more client was", "more clients were")
            yield f"{those} rejected{under}, no more often than these."


def silenced(group: Group) -> Iterator[str]:
    """Clients with less than a fifth of the weight that their size gives them, and clients that have nearly all.

    A client is silenced where its mean weight over the rounds in which it took part is below a fifth of its share of
    the samples, if this share is at least 5 %. One that never took part was not silenced by weights. That one client
    has 0.9 or more of the weight is said of rounds in which others took part too.
    """
    shares, clients = group.first.federation.shares, group.first.clients
    for method in group.methods:
        found = method.influence
        if found is None:
            continue
        present = found.when_present
        quiet = [k for k, share in enumerate(shares) if share >= LEAST_SHARE and present[k] < SILENT * share]
        quiet.sort(key=lambda k: present[k] / shares[k])
        for k in quiet[:MOST_NAMED]:
            yield (
                f"{method.label} all but silences client {clients[k]}: its mean weight over the "
                f"{method.scores.shape[1]} rounds is {present[k]:.2g}, against {shares[k]:.2g} by size."
            )
        if (more := len(quiet) - MOST_NAMED) > 0:
            yield f"{method.label} all but silences {more} more client{'s' if more > 1 else ''}."
        if found.peak is not None and found.peak.weight >= MOST_OF_ALL:
            k = found.peak.client
            yield (
                f"{method.label} gives client {clients[k]} {found.peak.weight:.2g} of the weight in round "
                f"{found.peak.round + 1}, against {shares[k]:.2g} by size: the others hardly count there."
            )
