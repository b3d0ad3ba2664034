"""All streams that the API shows: those that Airflow's DAGs declare, and those of the configured ledgers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from headrace.connections import CONNECTION_PREFIX
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUrlError, StreamNotFoundError
from headrace.monitoring.summary import Placed, StreamSummary, summarize
from headrace.ui.api.airflow_side import AirflowSide, DeclaredStream
from headrace.ui.api.ledgers import OpenLedgers

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """A ledger that cannot be read, or a stream whose declaration is unclear, as one caller may see it."""

    ledger: str
    error: str
    remedy: str | None
    streams: tuple[str, ...]


class Catalogue:
    """Finds streams by name, and asks their ledgers."""

    def __init__(self, airflow: AirflowSide, ledgers: OpenLedgers) -> None:
        self._airflow = airflow
        self._ledgers = ledgers

    def summaries(self, readable: Callable[[str], bool]) -> tuple[list[StreamSummary], list[LedgerProblem]]:
        """Return the streams whose batch DAGs are ``readable``, sorted by name, and the ledgers that do not answer.

        A problem of a ledger whose declared streams are all not readable is left out.

        Ledgers are asked at the same time; each has its own time limit.
        """
        declared = self._by_ledger()
        flat = list(_flat(declared))
        facts = self._airflow.facts({dag_id for each in flat for dag_id in (each.batch_dag_id, each.receiver_dag_id)})

        def of_ledger(reference: str, named: Collection[DeclaredStream]) -> Callable[[Ledger], list[StreamSummary]]:
            def read(ledger: Ledger) -> list[StreamSummary]:
                places = {each.name: _place(each) for each in named}
                rows = ledger.streams.all()
                found = [(row, places.get(row.name) or undeclared(row.name, reference, flat)) for row in rows]
                return [summarize(ledger, row, place, facts) for row, place in found if _may_read(place, readable)]

            return read

        streams: dict[str, StreamSummary] = {}
        problems = [problem for each in flat for problem in _several(each, readable)]
        begun = []

        for reference, named in declared.items():
            try:
                begun.append((reference, named, self._ledgers.submit(reference, of_ledger(reference, named))))
            except HeadraceError as error:
                problems += _refused(reference, named, error, readable)
        for reference, named, future in begun:
            try:
                found = self._ledgers.answer(reference, future)
            except Exception as error:
                problems += _refused(reference, named, error, readable)
                continue
            for each in found:
                if each.name in streams:
                    problems.append(_twice(each, streams[each.name]))
                else:
                    streams[each.name] = each
            problems += _missing(reference, [each for each in named if _may_read(each, readable)], found)
        return sorted(streams.values(), key=lambda each: each.name), problems

    def find(self, name: str, readable: Callable[[str], bool]) -> Placed | None:
        """Return where a stream is whose batch DAGs are ``readable``; None if no DAG and no configured ledger has it.

        If several ledgers have one, it is the one that `summaries` shows.

        Raises:
            HeadraceError: it is in none of the ledgers that answer, and one does not answer.
        """
        declared = self._by_ledger()
        named = [each for each in _flat(declared) if each.name == name]
        if named:
            return next((_place(each) for each in named if _may_read(each, readable)), None)
        if not readable(undeclared(name, "").batch_dag_id):
            return None
        failure: HeadraceError | None = None
        for reference in declared:
            try:
                self._ledgers.ask(reference, lambda ledger: ledger.streams.get(name))
            except StreamNotFoundError:
                continue
            except HeadraceError as error:
                failure = error
            else:
                return undeclared(name, reference)
        if failure is not None:
            raise failure
        return None

    def of_dag(self, dag_id: str) -> DeclaredStream | None:
        """Return the stream that a DAG belongs to."""
        for each in self._airflow.declared():
            if dag_id in (*each.batch_dag_ids, each.receiver_dag_id, *each.replay_dag_ids):
                return each
        return None

    def _by_ledger(self) -> dict[str, list[DeclaredStream]]:
        found: dict[str, list[DeclaredStream]] = {}
        for each in self._airflow.declared():
            found.setdefault(each.ledger, []).append(each)
        for reference in self._airflow.ledgers():
            found.setdefault(reference, [])
        return found


def _flat(declared: dict[str, list[DeclaredStream]]) -> Iterator[DeclaredStream]:
    for named in declared.values():
        yield from named


def _place(stream: DeclaredStream) -> Placed:
    return Placed(
        stream.ledger, stream.batch_dag_id, stream.receiver_dag_id, stream.replay_dag_ids, stream.other_batch_dag_ids
    )


def undeclared(name: str, ledger: str, declared: Iterable[DeclaredStream] = ()) -> Placed:
    """The place of a stream that no DAG declares in this ledger: its DAGs have the factories' default ids.

    ``declared`` are streams of other ledgers. A reader needs the rights of those of the same name too: the same ledger
    can have two references.
    """
    others = dict.fromkeys(dag_id for each in declared if each.name == name for dag_id in each.batch_dag_ids)
    others.pop(f"{name}_batches", None)
    return Placed(ledger, f"{name}_batches", f"{name}_receiver", other_batch_dag_ids=tuple(others))


def _several(stream: DeclaredStream, readable: Callable[[str], bool]) -> Iterator[LedgerProblem]:
    """Yield a problem if several DAGs declare themselves the stream's batch DAG, naming those that are readable."""
    shown = [each for each in stream.batch_dag_ids if readable(each)]
    if stream.other_batch_dag_ids and shown:
        hidden = len(stream.batch_dag_ids) - len(shown)
        more = f" and {hidden} that you may not read" if hidden else ""
        yield LedgerProblem(
            stream.ledger,
            f"{len(stream.batch_dag_ids)} DAGs declare themselves the batch DAG of stream {stream.name}: "
            f"{', '.join(shown)}{more}. To read the stream or act on it, a user needs the right on each of them.",
            "Remove the copies, or declare another stream in them.",
            (stream.name,),
        )


def _may_read(place: Placed | DeclaredStream, readable: Callable[[str], bool]) -> bool:
    return all(map(readable, place.batch_dag_ids))


def _refused(
    reference: str, named: Collection[DeclaredStream], error: Exception, readable: Callable[[str], bool]
) -> Iterator[LedgerProblem]:
    """Yield the problem of a ledger, unless it has declared streams and none of them is readable."""
    shown = tuple(each.name for each in named if _may_read(each, readable))
    if shown or not named:
        yield _problem(reference, shown, error)


def _problem(reference: str, streams: tuple[str, ...], error: Exception) -> LedgerProblem:
    if isinstance(error, HeadraceError):
        what, remedy = error.what, error.remedy
    else:
        logger.error("the ledger %s cannot be read", reference, exc_info=error)
        what, remedy = f"{type(error).__name__}: {error}", None
    # A URL that is refused may hold a password.
    refused = isinstance(error, LedgerUrlError) and not reference.startswith(CONNECTION_PREFIX)
    return LedgerProblem("invalid ledger" if refused else reference, what, remedy, streams)


def _missing(
    reference: str,
    named: Collection[DeclaredStream],
    found: Collection[StreamSummary],
) -> Iterator[LedgerProblem]:
    """Yield the declared streams that are not in their ledger: none of their tasks has run yet."""
    there = {each.name for each in found}
    for each in named:
        if each.name not in there:
            yield LedgerProblem(
                reference,
                f"Stream {each.name} is not in its ledger yet: none of its tasks has run.",
                f"Unpause the DAGs {each.receiver_dag_id} and {each.batch_dag_id}.",
                (each.name,),
            )


def _twice(second: StreamSummary, first: StreamSummary) -> LedgerProblem:
    return LedgerProblem(
        second.ledger,
        f"A stream named {second.name} is in {first.ledger} too; only that one is shown.",
        "Give one of the two another name.",
        (second.name,),
    )
