"""Finds the streams that Airflow's DAGs declare, in the serialised DAGs of Airflow's database.

The DAG factories tag their DAGs ``headrace`` and give one task of each the stream's declaration as JSON documentation
(`headrace.dags.defaults.declaration`). A DAG of one's own is found if it does the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.models.dag import DagModel, DagTag
from airflow.models.serialized_dag import SerializedDagModel
from airflow.utils.session import create_session
from sqlalchemy import func, select

from headrace.ui.api.airflow_side import DeclaredStream

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

TAG = "headrace"
# A new stream appears on the page after this long.
_KEPT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one DAG declares."""

    dag_id: str
    stream: str
    ledger: str
    kind: str


class DeclaredStreams:
    """The declared streams, read at most once every five seconds. A DAG is read again only if it has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._streams: list[DeclaredStream] = []
        self._by_hash: dict[str, tuple[str, Declaration | None]] = {}

    def all(self) -> list[DeclaredStream]:
        """Return the streams, sorted by name and ledger."""
        with self._lock:
            if time.monotonic() - self._read_at > _KEPT_SECONDS:
                with create_session() as session:
                    self._streams = list(combined(self._declarations(session)))
                self._read_at = time.monotonic()
            return self._streams

    def _declarations(self, session: Session) -> list[Declaration]:
        tagged = select(DagTag.dag_id).where(DagTag.name == TAG)
        alive = select(DagModel.dag_id).where(DagModel.dag_id.in_(tagged), DagModel.is_stale.is_(False))
        newest = (
            select(SerializedDagModel.dag_id, func.max(SerializedDagModel.created_at).label("created_at"))
            .where(SerializedDagModel.dag_id.in_(alive))
            .group_by(SerializedDagModel.dag_id)
            .subquery()
        )
        rows = session.execute(
            select(SerializedDagModel.id, SerializedDagModel.dag_id, SerializedDagModel.dag_hash).join(
                newest,
                (SerializedDagModel.dag_id == newest.c.dag_id) & (SerializedDagModel.created_at == newest.c.created_at),
            )
        ).all()
        known: dict[str, tuple[str, Declaration | None]] = {}
        for row_id, dag_id, dag_hash in rows:
            before = self._by_hash.get(dag_id)
            if before is None or before[0] != dag_hash:
                model = session.get(SerializedDagModel, row_id)
                before = (dag_hash, None if model is None else declaration_in(dag_id, model.data or {}))
            known[dag_id] = before
        self._by_hash = known
        return [found for _, found in known.values() if found is not None]


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


def combined(declarations: Iterable[Declaration]) -> Iterator[DeclaredStream]:
    """Yield each stream with its DAGs. A stream without a batch DAG gets the default id, by which access is decided.

    Any DAG can declare any stream. So all that declare themselves its batch DAG are kept, and access needs the right on
    each of them.
    """
    streams: dict[tuple[str, str], list[Declaration]] = {}
    for each in declarations:
        streams.setdefault((each.stream, each.ledger), []).append(each)
    for (name, ledger), found in sorted(streams.items()):
        batch_dag_id, *others = _dag_ids(found, "batches", f"{name}_batches")
        yield DeclaredStream(
            name,
            ledger,
            batch_dag_id=batch_dag_id,
            receiver_dag_id=_dag_ids(found, "receiver", f"{name}_receiver")[0],
            replay_dag_ids=tuple(sorted(each.dag_id for each in found if each.kind == "replay")),
            other_batch_dag_ids=tuple(others),
        )


def _dag_ids(found: Collection[Declaration], kind: str, default: str) -> list[str]:
    """The DAGs of this kind, the default id first; the default id alone if there is none."""
    ids = {each.dag_id for each in found if each.kind == kind} or {default}
    return sorted(ids, key=lambda dag_id: (dag_id != default, dag_id))
