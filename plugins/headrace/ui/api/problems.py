"""What the list of streams says beside them: ledgers that cannot be read, and declarations that are unclear."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from headrace.connections import CONNECTION_PREFIX
from headrace.errors import HeadraceError
from headrace.ledger.errors import LedgerUrlError
from headrace.monitoring.evidence import DagFacts
from headrace.monitoring.summary import Placed

logger = logging.getLogger(__name__)


class ProblemKind(StrEnum):
    """What is wrong. The streams of a ledger that cannot be read are not listed; otherwise only one is concerned."""

    LEDGER_UNREADABLE = "ledger_unreadable"
    SEVERAL_BATCH_DAGS = "several_batch_dags"
    NOT_REGISTERED = "not_registered"
    NEW = "new"
    SAME_NAME = "same_name"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, as one caller may see it. ``ledger`` None: it is not one ledger's."""

    kind: ProblemKind
    ledger: str | None
    error: str
    remedy: str | None
    streams: tuple[str, ...]


def refused(reference: str, streams: Collection[Placed], error: Exception) -> Problem:
    """A ledger that raised ``error``; ``streams`` are those that are declared in it, and that the caller may read."""
    if isinstance(error, HeadraceError):
        what, remedy = error.what, error.remedy
    else:
        logger.error("the ledger %s cannot be read", reference, exc_info=error)
        what, remedy = f"{type(error).__name__}: {error}", None
    # A URL that is refused may hold a password.
    hidden = isinstance(error, LedgerUrlError) and not reference.startswith(CONNECTION_PREFIX)
    shown = "invalid ledger" if hidden else reference
    return Problem(ProblemKind.LEDGER_UNREADABLE, shown, what, remedy, tuple(each.name for each in streams))


def several_batch_dags(declared: Iterable[Placed], readable: Callable[[str], bool]) -> Iterator[Problem]:
    """Yield each stream of which several DAGs declare themselves the batch DAG, naming those that are readable."""
    claimed: dict[str, Placed] = {}
    for each in declared:
        # All references of a stream's ledger have the same DAGs.
        if each.other_batch_dag_ids:
            claimed.setdefault(each.name, each)
    for stream in claimed.values():
        dag_ids = stream.batch_dag_ids
        shown = [each for each in dag_ids if readable(each)]
        hidden = len(dag_ids) - len(shown)
        more = f" and {hidden} that you may not read" if hidden else ""
        if shown:
            yield Problem(
                ProblemKind.SEVERAL_BATCH_DAGS,
                None,
                f"{len(dag_ids)} DAGs declare themselves the batch DAG of stream {stream.name}: "
                f"{', '.join(shown)}{more}. To read the stream or act on it, a user needs the right on each of them.",
                "Remove the copies, or declare another stream in them. A DAG whose file is gone counts until it is "
                "deleted in Airflow (`airflow dags delete`).",
                (stream.name,),
            )


def is_new(stream: Placed, facts: Mapping[str, DagFacts]) -> bool:
    """Whether both DAGs of a stream that has no row in a ledger are paused, as Airflow adds them."""
    return all((dag := facts.get(each)) and dag.paused for each in (stream.batch_dag_id, stream.receiver_dag_id))


def not_registered(stream: Placed, facts: Mapping[str, DagFacts]) -> Problem:
    """A declared stream that is not in its ledger: a new one, or one whose tasks have not succeeded yet."""
    if is_new(stream, facts):
        return Problem(
            ProblemKind.NEW,
            stream.ledger,
            f"Unpause its DAGs {stream.receiver_dag_id} and {stream.batch_dag_id}: then it begins.",
            None,
            (stream.name,),
        )
    return Problem(
        ProblemKind.NOT_REGISTERED,
        stream.ledger,
        f"Stream {stream.name} is not in its ledger yet: none of its tasks has run.",
        f"Unpause the DAGs {stream.receiver_dag_id} and {stream.batch_dag_id}. If they are unpaused, the log of the "
        "task `receive` says what prevents it.",
        (stream.name,),
    )


def same_name(second: Placed, first: Placed) -> Problem:
    """A stream of a second ledger with the name of one that is shown."""
    return Problem(
        ProblemKind.SAME_NAME,
        second.ledger,
        f"A stream named {second.name} is in {first.ledger} too; only that one is shown.",
        "Give one of the two another name. If both lead to the same database, write it in one way only.",
        (second.name,),
    )
