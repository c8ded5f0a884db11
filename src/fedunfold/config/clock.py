"""The clock of an environment: how long clients take, and how an asynchronous server waits for them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedunfold.core.client_times import ClientTimes, by_client
from fedunfold.core.errors import InputError
from fedunfold.core.settings import Count, Positive, Settings
from fedunfold.data.federated import FederatedData
from fedunfold.io.atomic import read_text
from fedunfold.io.limits import TRACE_BYTES

if TYPE_CHECKING:
    from fedunfold.config.schema import Environment

NotNegative = Annotated[float, Field(ge=0)]
HEADS = ("client", "seconds", "lost")


class Training(Settings):
    """One training of a client in a trace.

    Attributes:
        client: The client's key.
        seconds: How long it takes, delays included.
        lost: Whether its update never arrives.
    """

    client: str
    seconds: Positive
    lost: bool = False


class Clock(Settings):
    """How long clients take in simulated time, and how many updates an asynchronous server waits for.

    The n-th training of client k takes seconds_per_step · τ_k · exp(speed_spread · z_k + jitter · z_kn) + delay · e_kn,
    with τ_k local steps, z normal and e exponential with mean 1, drawn by (seed, run, client, n). A client's
    participation probability is how likely an update arrives.

    Attributes:
        seconds_per_step: A local step of the median client.
        speed_spread: Standard deviation of the logarithm of the clients' speeds; 0: all are as fast.
        jitter: The same of one client's trainings.
        delay: Mean seconds that the network takes, both ways.
        trace: The trainings of every client in their order, in the place of what is drawn: a list, or a CSV file with
            the columns client, seconds and lost (0 or 1). In synchronous rounds the n-th training is that of round n.
        concurrency: How many clients train at a time in asynchronous rounds; by default as many as are drawn for a
            round.
        buffer: How many updates the server makes a step from in asynchronous rounds; by default a tenth of those that
            train at a time, and at least one.
        limit: Simulated seconds after which a run makes no further step, so that methods with longer and shorter steps
            can be compared after the same time; by default all rounds are made.

    >>> Clock(speed_spread=1.0, buffer=10).seconds_per_step
    1.0
    """

    seconds_per_step: Positive = 1.0
    speed_spread: NotNegative = 0.0
    jitter: NotNegative = 0.0
    delay: NotNegative = 0.0
    trace: str | tuple[Training, ...] | None = None
    concurrency: Count | None = None
    buffer: Count | None = None
    limit: Positive | None = None


def client_times(environment: "Environment", data: FederatedData) -> ClientTimes:
    """How long the clients of an environment take: by its clock, or where it has none, a second for each local step.

    Args:
        environment: Whose clients train.
        data: Their data.
    """
    clock, sizes, file = environment.clock or Clock(), data.sizes, environment.trace_file
    rows = clock.trace or () if file is None else _read(file)
    assert not isinstance(rows, str)
    return ClientTimes(
        data.keys,
        lambda k, t: environment.epochs(k, t) * -(-sizes[k] // environment.batch_size),
        tuple(client.participation_probability for client in environment.clients),
        environment.seed,
        **clock.model_dump(include={"seconds_per_step", "speed_spread", "jitter", "delay"}),
        trace=by_client([(row.client, row.seconds, row.lost) for row in rows]),
    )


def _read(path: Path) -> tuple[Training, ...]:
    """The rows of a CSV file."""
    try:
        lines = read_text(path, TRACE_BYTES).splitlines()
    except OSError as error:
        raise InputError(f"field clock.trace: {path} cannot be read ({error.strerror}); check the path.") from error
    heads = tuple(head.strip() for head in lines[0].split(",")) if lines else ()
    if heads not in (HEADS, HEADS[:2]):
        raise InputError(f"field clock.trace: {path} must begin with the line client,seconds or client,seconds,lost.")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = [cell.strip() for cell in line.split(",")]
        try:
            client, seconds, *lost = cells
            if len(cells) != len(heads) or lost not in ([], ["0"], ["1"]):
                raise ValueError
            rows.append(Training(client=client, seconds=float(seconds), lost=lost == ["1"]))
        except (ValueError, InputError):
            raise InputError(
                f"field clock.trace: {path} line {number} must be a client, its seconds above 0"
                f"{' and 0 or 1 for lost' if len(heads) == 3 else ''}, with commas between them."
            ) from None
    return tuple(rows)
