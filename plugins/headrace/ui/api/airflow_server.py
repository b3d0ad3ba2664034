"""Airflow as the API sees it, inside Airflow's API server: its users, rights, DAGs and runs, and the declared streams.

The DAG factories tag their DAGs ``headrace`` and give one task of each the stream's declaration as JSON documentation
(`headrace.dags.declaration.declaration`). A DAG that a user writes is found if it does the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import bearer_scheme, get_user
from airflow.configuration import conf
from airflow.models.connection import Connection
from airflow.models.dag import DagModel, DagTag
from airflow.models.dagrun import DagRun
from airflow.models.errors import ParseImportError
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from fastapi import HTTPException, Request
from sqlalchemy import and_, exists, func, select

from headrace.connections import CONNECTION_PREFIX, ConnectionNotFoundError, variable_name
from headrace.errors import HeadraceError
from headrace.ui.api.airflow_side import Caller, Interval, Run
from headrace.ui.plugin import ROOT_APP
from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEDGER_TYPE = "headrace_ledger"
_CREDENTIALS = ("authorization", "cookie")


class LedgerNotAllowedError(HeadraceError):
    """The API server does not open a ledger of which only a DAG's file has the address."""


class AirflowServer:
    """The Airflow whose API server this process is."""

    def __init__(self) -> None:
        self._declared = DeclaredStreams()

    async def caller(self, request: Request) -> Caller:
        user = await get_user(request, None, await bearer_scheme(request))
        return Caller(user.get_name(), user)

    def may(self, caller: Caller, method: str, dag_id: str, *, runs: bool = False) -> bool:
        # The auth manager also allows what does not exist: the id may be a guess, for a stream that no DAG declares.
        if not _exists(dag_id):
            return False
        allowed: bool = get_auth_manager().is_authorized_dag(
            method=method,  # type: ignore[arg-type]
            access_entity=DagAccessEntity.RUN if runs else None,
            details=DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)),
            user=caller.user,
        )
        return allowed

    def declared(self) -> Collection[Placed]:
        return self._declared.all()

    def ledgers(self) -> Collection[str]:
        with create_session() as session:
            of_type = select(Connection.conn_id).where(Connection.conn_type == _LEDGER_TYPE)
            ids = session.scalars(of_type.order_by(Connection.conn_id)).all()
        return list(dict.fromkeys([*_configured(), *map(_reference, ids)]))

    def metrics_token(self) -> str:
        return conf.get("headrace", "metrics_token", fallback="").strip()

    def environ(self, reference: str) -> Mapping[str, str] | None:
        if not reference.startswith(CONNECTION_PREFIX):
            _refuse_another_server(reference)
            return None
        conn_id = reference.removeprefix(CONNECTION_PREFIX)
        connection = _connection(conn_id)
        # SQLite has no login, and the URL of a file needs no entry either.
        if connection.conn_type not in (_LEDGER_TYPE, "sqlite") and reference not in _configured():
            raise LedgerNotAllowedError(
                f"A DAG names the connection {conn_id!r} as its ledger, which is of type {connection.conn_type!r}, and "
                f"the API server logs in only with those of type {_LEDGER_TYPE}.",
                remedy=f"If it leads to a ledger, give it the type {_LEDGER_TYPE}, or add its id to [headrace] ledgers "
                "in Airflow's configuration.",
            )
        return _as_environ(connection)

    def connection(self, conn_id: str) -> Mapping[str, str]:
        return _as_environ(_connection(conn_id))

    def facts(self, dag_ids: Collection[str]) -> Mapping[str, DagFacts]:
        ids = list(dag_ids)
        with create_session() as session:
            dags = session.execute(
                select(DagModel.dag_id, DagModel.is_paused, ParseImportError.stacktrace, DagModel.is_stale)
                .join(ParseImportError, of_same_file(), isouter=True)
                .where(DagModel.dag_id.in_(ids))
            ).all()
            active = session.execute(
                select(DagRun.dag_id, DagRun.state, func.count())
                .where(DagRun.dag_id.in_(ids), DagRun.state.in_(("running", "queued")))
                .group_by(DagRun.dag_id, DagRun.state)
            ).all()
        counts = {(dag_id, str(state)): int(number) for dag_id, state, number in active}
        return {
            dag_id: DagFacts(
                dag_id,
                paused=bool(paused),
                running=counts.get((dag_id, "running"), 0),
                queued=counts.get((dag_id, "queued"), 0),
                import_error=None if trace is None else _last_line(trace),
                stale=bool(stale),
            )
            for dag_id, paused, trace, stale in dags
        }

    def run(self, dag_id: str, run_id: str) -> Run | None:
        return _run(dag_id, DagRun.run_id == run_id)

    def run_ending(self, dag_id: str, ended_ms: int) -> Run | None:
        ended = _EPOCH + timedelta(milliseconds=ended_ms)
        # An interval is a day at most in practice; with the lower bound the index by DAG and logical date is enough.
        since = ended - timedelta(days=1)
        return _run(dag_id, DagRun.logical_date.between(since, ended), DagRun.data_interval_end == ended)

    async def clear(self, request: Request, run: Run, *, reason: str | None) -> None:
        path = f"/dags/{quote(run.dag_id)}/dagRuns/{quote(run.run_id, safe='')}/clear"
        body = {"dry_run": False, "only_failed": False, **({"note": reason} if reason else {})}
        await _ask(request, path, body)

    async def trigger(self, request: Request, dag_id: str, interval: Interval, conf: Mapping[str, Any]) -> Run:
        # Airflow gives a logical date only one run, and the interval's start has the schedule's. Any other millisecond
        # inside the interval belongs to the same batch.
        offset_ms = 1 + time.time_ns() // 1_000_000 % max(1, interval.interval_ms - 1)
        at = _EPOCH + timedelta(milliseconds=interval.start_ms + offset_ms)
        body = {"logical_date": at.isoformat(), "conf": dict(conf)}
        answer = await _ask(request, f"/dags/{quote(dag_id)}/dagRuns", body)
        return Run(dag_id, str(answer["dag_run_id"]), str(answer["state"]))

    def batch_time_of(self, dag_id: str, run_id: str) -> int | None:
        query = select(DagRun.data_interval_end).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        with create_session() as session:
            ended = session.scalar(query)
        return None if ended is None else (ended - _EPOCH) // timedelta(milliseconds=1)


def _configured() -> list[str]:
    """The references of the ledgers that Airflow's configuration names."""
    named = conf.get("headrace", "ledgers", fallback="").split(",")
    return [_reference(part.strip()) for part in named if part.strip()]


def _refuse_another_server(url: str) -> None:
    """Refuse the URL of a server, unless Airflow's configuration names it.

    The author of any DAG chooses the ledger's reference in it, and this process may have a password in its environment
    (PGPASSWORD, a pgpass file), which the server would get.
    """
    if not url.startswith("sqlite") and url not in _configured():
        raise LedgerNotAllowedError(
            "A DAG names a ledger by the URL of a server, which the API server does not open.",
            remedy="Name it by an Airflow connection (connection:<its id>), or add the URL, exactly as it is in the "
            "stream's definition, to [headrace] ledgers in Airflow's configuration.",
        )


def _connection(conn_id: str) -> Connection:
    try:
        return Connection.get_connection_from_secrets(conn_id)
    except (AirflowNotFoundException, PermissionError) as error:
        raise ConnectionNotFoundError(
            f"Airflow's API server has no connection {conn_id!r}.",
            remedy="Define it in Airflow, in a place that the API server can read.",
        ) from error


def _as_environ(connection: Connection) -> Mapping[str, str]:
    # Not put into the process's environment: it is passed for this one look-up.
    return {variable_name(connection.conn_id): connection.as_json()}


def _last_line(trace: str) -> str:
    """The exception of a stack trace."""
    return next(iter(reversed(trace.strip().splitlines())), "the import error has no text").strip()


def _exists(dag_id: str) -> bool:
    with create_session() as session:
        return session.scalar(select(DagModel.dag_id).where(DagModel.dag_id == dag_id)) is not None


def _run(dag_id: str, *conditions: Any) -> Run | None:
    query = select(DagRun.run_id, DagRun.state, DagRun.conf).where(DagRun.dag_id == dag_id, *conditions)
    with create_session() as session:
        row = session.execute(query.order_by(DagRun.logical_date.desc()).limit(1)).first()
    return None if row is None else Run(dag_id, row.run_id, str(row.state), row.conf or {})


def _reference(named: str) -> str:
    """A ledger's reference from a URL, a connection's id, or ``connection:<id>``."""
    is_reference = "://" in named or named.startswith(CONNECTION_PREFIX)
    return named if is_reference else f"{CONNECTION_PREFIX}{named}"


async def _ask(request: Request, path: str, body: Mapping[str, Any]) -> Any:
    """POST to Airflow's own API within this process, as the caller: Airflow checks the rights and writes its audit log.

    Raises:
        HTTPException: Airflow's answer, if it refuses.
    """
    headers = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
    transport = httpx.ASGITransport(app=request.scope[ROOT_APP])
    async with httpx.AsyncClient(transport=transport, base_url="http://airflow", timeout=60) as client:
        answer = await client.post(f"/api/v2{path}", json=dict(body), headers=headers)
    if answer.is_success:
        return answer.json()
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text[:500]
    raise HTTPException(answer.status_code, f"Airflow refuses it: {detail}")


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
        return [replace(dag, stale=dag.dag_id in stale) for _, dag in known.values() if dag is not None]


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
            declared = json.loads(text)["headrace"]
            return Declaration(dag_id, str(declared["stream"]), str(declared["ledger"]), str(declared["kind"]))
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
    for declaration in declarations:
        of_name.setdefault(declaration.stream, []).append(declaration)
        if not declaration.stale:
            streams.setdefault((declaration.stream, declaration.ledger), []).append(declaration)
    for (name, ledger), declared in sorted(streams.items()):
        here, default = _dag_ids(declared, "batches"), f"{name}_batches"
        claiming = (default,) if default in here else (*here, *_dag_ids(of_name[name], "batches"))
        batch_dag_id, *others = dict.fromkeys(claiming or (default,))
        yield Placed(
            name,
            ledger,
            batch_dag_id=batch_dag_id,
            receiver_dag_id=next(iter(_dag_ids(declared, "receiver")), f"{name}_receiver"),
            replay_dag_ids=_dag_ids(declared, "replay"),
            other_batch_dag_ids=tuple(others),
        )


def _dag_ids(declarations: Collection[Declaration], kind: str) -> tuple[str, ...]:
    """The DAGs of this kind, the default id first."""
    ids = {(dag.dag_id != f"{dag.stream}_{kind}", dag.dag_id) for dag in declarations if dag.kind == kind}
    return tuple(dag_id for _, dag_id in sorted(ids))
