"""All streams that the API shows, and their open ledgers: those of Airflow's DAGs, and those of configured ledgers.

A ledger that does not answer must not block the others, nor use up the server's threads: each has at most a few calls
under way, and a call that takes too long is given up with an error (its thread ends when the database answers).
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TypeVar

from sqlalchemy.engine import URL

from headrace.connections import CONNECTION_PREFIX
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.database import engine_url
from headrace.ledger.errors import LedgerMissingError, LedgerUnavailableError, LedgerUrlError, StreamNotFoundError
from headrace.secrets import without_secrets
from headrace.ui.api.airflow_side import AirflowSide
from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed, Problem, ProblemKind, StreamSummary, default_place, summaries

logger = logging.getLogger(__name__)


class Catalogue:
    """Finds streams by name, and asks their ledgers: all at the same time, with one deadline."""

    def __init__(self, airflow: AirflowSide, ledgers: OpenLedgers) -> None:
        self._airflow = airflow
        self._ledgers = ledgers

    def summaries(self, readable: Callable[[str], bool]) -> tuple[list[StreamSummary], list[Problem]]:
        """Return the streams whose batch DAGs are ``readable``, sorted by name, and what else there is to say.

        A problem of a ledger whose declared streams are all not readable is left out.
        """
        deadline = self._ledgers.deadline()
        declared = self._by_ledger()
        flat = [place for named in declared.values() for place in named]
        facts = self._airflow.facts(
            {dag_id for place in flat for dag_id in (place.batch_dag_id, place.receiver_dag_id)}
        )

        def of_ledger(reference: str, named: Collection[Placed]) -> Callable[[Ledger], list[StreamSummary]]:
            def of(ledger: Ledger) -> list[StreamSummary]:
                places = {place.name: place for place in named}
                rows = ledger.streams.all()
                placed = [(row, places.get(row.name) or undeclared(row.name, reference, flat)) for row in rows]
                return summaries(ledger, [(row, place) for row, place in placed if may_read(place, readable)], facts)

            return of

        begun = {
            reference: self._ledgers.submit(reference, of_ledger(reference, named))
            for reference, named in declared.items()
        }
        read: list[StreamSummary] = []
        problems = list(several_batch_dags(flat, readable))
        for reference, future in begun.items():
            shown = [place for place in declared[reference] if may_read(place, readable)]
            try:
                answered = self._ledgers.answer(reference, future, deadline)
            except LedgerMissingError as error:
                new = [place for place in shown if is_new(place, facts)]
                problems += [not_registered(place, facts) for place in new]
                left = [place for place in shown if place not in new]
                if left or not declared[reference]:
                    problems.append(refused(reference, left, error))
                continue
            except Exception as error:
                if shown or not declared[reference]:
                    problems.append(refused(reference, shown, error))
                continue
            read += answered
            there = {stream.name for stream in answered}
            problems += [not_registered(place, facts) for place in shown if place.name not in there]
        streams: dict[str, StreamSummary] = {}
        # A stream that moved to another ledger has left a row in the first one, where no DAG declares it any more.
        places = {(place.ledger, place.name) for place in flat}
        for stream in sorted(read, key=lambda stream: (stream.ledger, stream.name) not in places):
            if stream.name in streams:
                problems.append(same_name(stream.place, streams[stream.name].place))
            else:
                streams[stream.name] = stream
        return sorted(streams.values(), key=lambda stream: stream.name), problems

    def find(self, name: str, readable: Callable[[str], bool]) -> Placed | None:
        """Return where a stream is whose batch DAGs are ``readable``; None if no DAG and no configured ledger has it.

        If several ledgers have one, it is the one that `summaries` shows.

        Raises:
            HeadraceError: it is in none of the ledgers that answer, and one does not answer.
        """
        declared = self._by_ledger()
        named = [place for known in declared.values() for place in known if place.name == name]
        candidates = named or [undeclared(name, reference) for reference in declared]
        places = [place for place in candidates if may_read(place, readable)]
        if named and len(places) < 2:
            return places[0] if places else None
        # The same stream under several references, or none: a ledger that has it is needed.
        return self._first_that_has(name, places) or (places[0] if named else None)

    def _first_that_has(self, name: str, places: Sequence[Placed]) -> Placed | None:
        deadline = self._ledgers.deadline()
        submit = self._ledgers.submit
        begun = [(place, submit(place.ledger, lambda ledger: ledger.streams.get(name))) for place in places]
        failure: HeadraceError | None = None
        for place, future in begun:
            try:
                self._ledgers.answer(place.ledger, future, deadline)
            except StreamNotFoundError:
                continue
            except HeadraceError as error:
                failure = error
            else:
                return place
        if failure is not None:
            raise failure
        return None

    def of_dag(self, dag_id: str) -> Placed | None:
        """Return the stream that a DAG belongs to."""
        for place in self._airflow.declared():
            if dag_id in (*place.batch_dag_ids, place.receiver_dag_id, *place.replay_dag_ids):
                return place
        return None

    def _by_ledger(self) -> dict[str, list[Placed]]:
        places: dict[str, list[Placed]] = {}
        for place in self._airflow.declared():
            places.setdefault(place.ledger, []).append(place)
        for reference in self._airflow.ledgers():
            places.setdefault(reference, [])
        return places


def undeclared(name: str, ledger: str, declared: Iterable[Placed] = ()) -> Placed:
    """The place of a stream that no DAG declares in this ledger: its DAGs have the factories' default ids.

    ``declared`` are streams of other ledgers. A reader needs the rights of those of the same name too: the same ledger
    can have two references.
    """
    others = dict.fromkeys(dag_id for place in declared if place.name == name for dag_id in place.batch_dag_ids)
    place = default_place(name, ledger)
    others.pop(place.batch_dag_id, None)
    return replace(place, other_batch_dag_ids=tuple(others))


def may_read(place: Placed, readable: Callable[[str], bool]) -> bool:
    """Whether each DAG that decides about the stream is readable."""
    return all(map(readable, place.batch_dag_ids))


T = TypeVar("T")
MAX_OPEN = 50
"""How many ledgers are kept open; the least recently used one is closed."""
SECONDS = 10.0
"""How long a ledger has to answer."""
_CALLS_AT_ONCE = 4
# A connection that was changed in Airflow counts after this long. Looking it up may ask a secrets backend.
_LOOK_UP_SECONDS = 30.0


class LedgerSilentError(HeadraceError):
    """A ledger did not answer in time."""


class OpenLedgers:
    """Opens ledgers by reference, and keeps them open. Creates and migrates none. Safe across threads."""

    def __init__(
        self, environ: Callable[[str], Mapping[str, str] | None], *, seconds: float = SECONDS, max_open: int = MAX_OPEN
    ) -> None:
        """``environ`` returns the environment in which a reference's connection is looked up."""
        self._environ = environ
        self._seconds = seconds
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenLedger] = OrderedDict()

    def ask(self, reference: str, question: Callable[[Ledger], T]) -> T:
        """Call ``question`` with the ledger, in a thread of the ledger's own, and return its result.

        Raises:
            LedgerSilentError: it did not answer in time.
            HeadraceError: it cannot be opened, or the question raises.
        """
        return self.answer(reference, self.submit(reference, question), self.deadline())

    def deadline(self) -> float:
        """Return the time of the monotonic clock until which a ledger that is asked now has to answer."""
        return time.monotonic() + self._seconds

    def submit(self, reference: str, question: Callable[[Ledger], T]) -> Future[T]:
        """Begin `ask`. The future has a LedgerSilentError if too many calls to this ledger have not returned yet."""
        try:
            return self._of(reference).submit(question)
        except HeadraceError as error:
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused

    def answer(self, reference: str, future: Future[T], deadline: float) -> T:
        """Wait until ``deadline`` for what `submit` has begun. Ledgers that are asked together share a deadline."""
        try:
            return future.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise _silent(reference, f"It has not answered for {self._seconds:g} s.") from None

    def close(self) -> None:
        """Close all ledgers."""
        with self._lock:
            closing, self._open = list(self._open.values()), OrderedDict()
        for ledger in closing:
            ledger.close()

    def _of(self, reference: str) -> _OpenLedger:
        with self._lock:
            ledger = self._open.get(reference)
            if ledger is None:
                ledger = self._open[reference] = _OpenLedger(reference, self._environ)
            self._open.move_to_end(reference)
            oldest = self._open.popitem(last=False)[1] if len(self._open) > self._max_open else None
        if oldest is not None:
            oldest.close()
        return ledger


class _OpenLedger:
    """One ledger, opened by its first question; one that cannot be opened is tried again by the next.

    If its connection leads elsewhere, or has another password, the ledger is opened anew.
    """

    def __init__(self, reference: str, environ: Callable[[str], Mapping[str, str] | None]) -> None:
        self._reference = reference
        self._environ = environ
        self._pool = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="headrace-ledger")
        self._slots = threading.BoundedSemaphore(4 * _CALLS_AT_ONCE)
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._url: URL | None = None
        self._looked_up = float("-inf")

    def submit(self, question: Callable[[Ledger], T]) -> Future[T]:
        if not self._slots.acquire(blocking=False):
            raise _silent(self._reference, "Earlier questions to it have no answer yet.")
        try:
            future = self._pool.submit(self._ask, question)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        with self._lock:
            ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _ask(self, question: Callable[[Ledger], T]) -> T:
        try:
            return question(self._opened())
        except LedgerUnavailableError:
            # The database may refuse the login because the password has changed. Its text cannot be relied on, so the
            # connection is looked up again after any such error.
            self._looked_up = float("-inf")
            raise

    def _opened(self) -> Ledger:
        with self._lock:
            if self._ledger is None or time.monotonic() - self._looked_up > _LOOK_UP_SECONDS:
                environ = self._environ(self._reference)
                url = engine_url(self._reference, environ)
                if self._ledger is None or url != self._url:
                    before, self._ledger = self._ledger, None
                    if before is not None:
                        before.close()
                    self._ledger = Ledger.open(self._reference, create=False, environ=environ)
                    self._url = url
                self._looked_up = time.monotonic()
            return self._ledger


def _silent(reference: str, what: str) -> LedgerSilentError:
    return LedgerSilentError(
        f"The ledger {reference} does not answer. {what}",
        remedy="Look whether its database runs, and whether the API server can reach it.",
    )


def refused(reference: str, streams: Collection[Placed], error: Exception) -> Problem:
    """A ledger that raised ``error``; ``streams`` are those that are declared in it, and that the caller may read."""
    if isinstance(error, HeadraceError):
        what, remedy = error.what, error.remedy
    else:
        what, remedy = without_secrets(f"{type(error).__name__}: {error}"), None
        trace = without_secrets("".join(traceback.format_exception(error)))
        logger.error("the ledger %s cannot be read\n%s", reference, trace)
    # A URL that is refused may hold a password.
    hidden = isinstance(error, LedgerUrlError) and not reference.startswith(CONNECTION_PREFIX)
    shown = "invalid ledger" if hidden else reference
    names = tuple(stream.name for stream in streams)
    return Problem(kind=ProblemKind.LEDGER_UNREADABLE, ledger=shown, error=what, remedy=remedy, streams=names)


def several_batch_dags(declared: Iterable[Placed], readable: Callable[[str], bool]) -> Iterator[Problem]:
    """Yield each stream of which several DAGs declare themselves the batch DAG, naming those that are readable."""
    claimed: dict[str, Placed] = {}
    for stream in declared:
        # All references of a stream's ledger have the same DAGs.
        if stream.other_batch_dag_ids:
            claimed.setdefault(stream.name, stream)
    for stream in claimed.values():
        dag_ids = stream.batch_dag_ids
        shown = [dag_id for dag_id in dag_ids if readable(dag_id)]
        hidden = len(dag_ids) - len(shown)
        more = f" and {hidden} that you may not read" if hidden else ""
        if shown:
            yield Problem(
                kind=ProblemKind.SEVERAL_BATCH_DAGS,
                ledger=None,
                error=(
                    f"{len(dag_ids)} DAGs declare themselves the batch DAG of stream {stream.name}: "
                    f"{', '.join(shown)}{more}. To read the stream or act on it, a user needs the right on each of "
                    "them."
                ),
                remedy=(
                    "Remove the copies, or declare another stream in them. A DAG whose file is gone counts until it is "
                    "deleted in Airflow (`airflow dags delete`)."
                ),
                streams=(stream.name,),
            )


def is_new(stream: Placed, facts: Mapping[str, DagFacts]) -> bool:
    """Whether both DAGs of a stream that has no row in a ledger are paused, as Airflow adds them."""
    return all((dag := facts.get(dag_id)) and dag.paused for dag_id in (stream.batch_dag_id, stream.receiver_dag_id))


def not_registered(stream: Placed, facts: Mapping[str, DagFacts]) -> Problem:
    """A declared stream that is not in its ledger: a new one, or one whose tasks have not succeeded yet."""
    if is_new(stream, facts):
        return Problem(
            kind=ProblemKind.NEW,
            ledger=stream.ledger,
            error=f"Unpause its DAGs {stream.receiver_dag_id} and {stream.batch_dag_id}: then it begins.",
            remedy=None,
            streams=(stream.name,),
        )
    return Problem(
        kind=ProblemKind.NOT_REGISTERED,
        ledger=stream.ledger,
        error=f"Stream {stream.name} is not in its ledger yet: none of its tasks has run.",
        remedy=(
            f"Unpause the DAGs {stream.receiver_dag_id} and {stream.batch_dag_id}. If they are unpaused, the log of "
            "the task `receive` says what prevents it."
        ),
        streams=(stream.name,),
    )


def same_name(second: Placed, first: Placed) -> Problem:
    """A stream of a second ledger with the name of one that is shown."""
    return Problem(
        kind=ProblemKind.SAME_NAME,
        ledger=second.ledger,
        error=f"A stream named {second.name} is in {first.ledger} too; only that one is shown.",
        remedy="Give one of the two another name. If both lead to the same database, write it in one way only.",
        streams=(second.name,),
    )
