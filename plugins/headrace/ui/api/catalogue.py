"""All streams that the API shows: those that Airflow's DAGs declare, and those of the configured ledgers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerMissingError, StreamNotFoundError
from headrace.monitoring.summary import Placed, StreamSummary, default_place, summaries
from headrace.ui.api.airflow_side import AirflowSide
from headrace.ui.api.ledgers import OpenLedgers
from headrace.ui.api.problems import Problem, is_new, not_registered, refused, same_name, several_batch_dags


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
        flat = [each for named in declared.values() for each in named]
        facts = self._airflow.facts({dag_id for each in flat for dag_id in (each.batch_dag_id, each.receiver_dag_id)})

        def of_ledger(reference: str, named: Collection[Placed]) -> Callable[[Ledger], list[StreamSummary]]:
            def of(ledger: Ledger) -> list[StreamSummary]:
                places = {each.name: each for each in named}
                rows = ledger.streams.all()
                found = [(row, places.get(row.name) or undeclared(row.name, reference, flat)) for row in rows]
                return summaries(ledger, [each for each in found if may_read(each[1], readable)], facts)

            return of

        begun = {each: self._ledgers.submit(each, of_ledger(each, named)) for each, named in declared.items()}
        read: list[StreamSummary] = []
        problems = list(several_batch_dags(flat, readable))
        for reference, future in begun.items():
            shown = [each for each in declared[reference] if may_read(each, readable)]
            try:
                found = self._ledgers.answer(reference, future, deadline)
            except LedgerMissingError as error:
                new = [each for each in shown if is_new(each, facts)]
                problems += [not_registered(each, facts) for each in new]
                left = [each for each in shown if each not in new]
                if left or not declared[reference]:
                    problems.append(refused(reference, left, error))
                continue
            except Exception as error:
                if shown or not declared[reference]:
                    problems.append(refused(reference, shown, error))
                continue
            read += found
            there = {each.name for each in found}
            problems += [not_registered(each, facts) for each in shown if each.name not in there]
        streams: dict[str, StreamSummary] = {}
        # A stream that moved to another ledger has left a row in the first one, where no DAG declares it any more.
        places = {(each.ledger, each.name) for each in flat}
        for each in sorted(read, key=lambda each: (each.ledger, each.name) not in places):
            if each.name in streams:
                problems.append(same_name(each, streams[each.name]))
            else:
                streams[each.name] = each
        return sorted(streams.values(), key=lambda each: each.name), problems

    def find(self, name: str, readable: Callable[[str], bool]) -> Placed | None:
        """Return where a stream is whose batch DAGs are ``readable``; None if no DAG and no configured ledger has it.

        If several ledgers have one, it is the one that `summaries` shows.

        Raises:
            HeadraceError: it is in none of the ledgers that answer, and one does not answer.
        """
        declared = self._by_ledger()
        named = [each for known in declared.values() for each in known if each.name == name]
        candidates = named or [undeclared(name, reference) for reference in declared]
        places = [each for each in candidates if may_read(each, readable)]
        if named and len(places) < 2:
            return places[0] if places else None
        # The same stream under several references, or none: a ledger that has it is needed.
        return self._first_that_has(name, places) or (places[0] if named else None)

    def _first_that_has(self, name: str, places: Sequence[Placed]) -> Placed | None:
        deadline = self._ledgers.deadline()
        begun = [(each, self._ledgers.submit(each.ledger, lambda ledger: ledger.streams.get(name))) for each in places]
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
        for each in self._airflow.declared():
            if dag_id in (*each.batch_dag_ids, each.receiver_dag_id, *each.replay_dag_ids):
                return each
        return None

    def _by_ledger(self) -> dict[str, list[Placed]]:
        found: dict[str, list[Placed]] = {}
        for each in self._airflow.declared():
            found.setdefault(each.ledger, []).append(each)
        for reference in self._airflow.ledgers():
            found.setdefault(reference, [])
        return found


def undeclared(name: str, ledger: str, declared: Iterable[Placed] = ()) -> Placed:
    """The place of a stream that no DAG declares in this ledger: its DAGs have the factories' default ids.

    ``declared`` are streams of other ledgers. A reader needs the rights of those of the same name too: the same ledger
    can have two references.
    """
    others = dict.fromkeys(dag_id for each in declared if each.name == name for dag_id in each.batch_dag_ids)
    place = default_place(name, ledger)
    others.pop(place.batch_dag_id, None)
    return replace(place, other_batch_dag_ids=tuple(others))


def may_read(place: Placed, readable: Callable[[str], bool]) -> bool:
    """Whether each DAG that decides about the stream is readable."""
    return all(map(readable, place.batch_dag_ids))
