"""Finds the streams that Airflow's DAGs declare, in the serialised DAGs of Airflow's database.

The DAG factories tag their DAGs ``headrace`` and give one task of each the stream's declaration as JSON documentation
(`headrace.dags.declaration.declaration`). A DAG that a user writes is found if it does the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow.models.dag import DagModel, DagTag
from airflow.models.errors import ParseImportError
from airflow.models.serialized_dag import SerializedDagModel
from airflow.utils.session import create_session
from sqlalchemy import and_, exists, func, select

from headrace.monitoring.summary import Placed

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session

TAG = "headrace"
# A new stream appears on the page after this long.
_KEPT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one DAG declares. ``stale``: Airflow no longer finds the DAG in a file, and nobody has deleted it."""

    dag_id: str
    stream: str
    ledger: str
    kind: str
    stale: bool = False


class DeclaredStreams:
    """The declared streams, read at most once every five seconds. A DAG is read again only if it has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._streams: list[Placed] = []
        self._by_hash: dict[str, tuple[str, Declaration | None]] = {}

    def all(self) -> list[Placed]:
        """Return the streams, sorted by name and ledger."""
        with self._lock:
            if time.monotonic() - self._read_at > _KEPT_SECONDS:
                with create_session() as session:
                    self._streams = list(combined(self._declarations(session)))
                self._read_at = time.monotonic()
            return self._streams

    def _declarations(self, session: Session) -> list[Declaration]:
        tagged = select(DagTag.dag_id).where(DagTag.name == TAG)
        # The DAGs of a file that cannot be imported become stale too. Their streams stay, and show the import error.
        gone = DagModel.is_stale & ~exists().where(of_same_file())
        newest = (
            select(SerializedDagModel.dag_id, func.max(SerializedDagModel.created_at).label("created_at"))
            .where(SerializedDagModel.dag_id.in_(tagged))
            .group_by(SerializedDagModel.dag_id)
            .subquery()
        )
        rows = session.execute(
            select(SerializedDagModel.id, SerializedDagModel.dag_id, SerializedDagModel.dag_hash, gone)
            .join(
                newest,
                (SerializedDagModel.dag_id == newest.c.dag_id) & (SerializedDagModel.created_at == newest.c.created_at),
            )
            .join(DagModel, DagModel.dag_id == SerializedDagModel.dag_id)
        ).all()
        stale = {dag_id for _, dag_id, _, is_gone in rows if is_gone}
        known: dict[str, tuple[str, Declaration | None]] = {}
        for row_id, dag_id, dag_hash, _ in rows:
            before = self._by_hash.get(dag_id)
            if before is None or before[0] != dag_hash:
                model = session.get(SerializedDagModel, row_id)
                before = (dag_hash, None if model is None else declaration_in(dag_id, model.data or {}))
            known[dag_id] = before
        self._by_hash = known
        return [replace(found, stale=found.dag_id in stale) for _, found in known.values() if found is not None]


def of_same_file() -> ColumnElement[bool]:
    """The condition that an import error is of a DAG's file."""
    return and_(
        ParseImportError.filename == DagModel.relative_fileloc, ParseImportError.bundle_name == DagModel.bundle_name
    )


def declaration_in(dag_id: str, data: Mapping[str, Any]) -> Declaration | None:
    """Return what a serialised DAG declares, or None."""
    for task in (data.get("dag") or {}).get("tasks") or ():
        text = (task.get("__var") or task).get("doc_json")
        if not isinstance(text, str):
            continue
        try:
            found = json.loads(text)["headrace"]
            return Declaration(dag_id, str(found["stream"]), str(found["ledger"]), str(found["kind"]))
        except (ValueError, KeyError, TypeError):
            # The user's own documentation of a task.
            continue
    return None


def combined(declarations: Iterable[Declaration]) -> Iterator[Placed]:
    """Yield each stream with its DAGs. A stream without a batch DAG gets the default id, by which access is decided.

    Any DAG can declare any stream. Where the DAG with the factories' default id declares it in the same ledger, it
    decides alone: a DAG's id belongs to one DAG in an Airflow, so no other DAG can hide the stream from its users.
    Otherwise all that declare themselves its batch DAG are kept, and access needs the right on each of them. Only the
    name counts then: a ledger can have several references, such as two spellings of a URL or two connections, and
    whether they lead to the same database cannot be seen from them. A stale DAG declares nothing, but still decides:
    otherwise another one would decide alone as soon as the stream's own file is missing for a moment.
    """
    streams: dict[tuple[str, str], list[Declaration]] = {}
    of_name: dict[str, list[Declaration]] = {}
    for each in declarations:
        of_name.setdefault(each.stream, []).append(each)
        if not each.stale:
            streams.setdefault((each.stream, each.ledger), []).append(each)
    for (name, ledger), found in sorted(streams.items()):
        here, default = _dag_ids(found, "batches"), f"{name}_batches"
        claiming = (default,) if default in here else (*here, *_dag_ids(of_name[name], "batches"))
        batch_dag_id, *others = dict.fromkeys(claiming or (default,))
        yield Placed(
            name,
            ledger,
            batch_dag_id=batch_dag_id,
            receiver_dag_id=next(iter(_dag_ids(found, "receiver")), f"{name}_receiver"),
            replay_dag_ids=_dag_ids(found, "replay"),
            other_batch_dag_ids=tuple(others),
        )


def _dag_ids(found: Collection[Declaration], kind: str) -> tuple[str, ...]:
    """The DAGs of this kind, the default id first."""
    ids = {(each.dag_id != f"{each.stream}_{kind}", each.dag_id) for each in found if each.kind == kind}
    return tuple(dag_id for _, dag_id in sorted(ids))
