"""Manages the leases of receiver jobs: one job per stream, each with its own epoch, and of jobs that streams share.

A shared job is one process for each name, which runs these streams' receiver jobs. Nothing that a stream stores depends
on its lease: each stream has its own, by which it is fenced. The shared lease only keeps two tasks from starting two
processes.

`ListenerCursors` has how far each listener of a job has got the events, so that it continues there after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.ledger.clock_corrections import shorten_leases, take_back
from headrace.ledger.database import LockedStream, Repository
from headrace.ledger.errors import LeaseHeldError, LeaseLostError, LedgerConflictError, LedgerError
from headrace.ledger.events import record, record_all
from headrace.ledger.receiving.tables import closing_values, receivers, segments
from headrace.ledger.states import EventKind, JobState, ReceiverState
from headrace.ledger.tables import (
    JobLease,
    JobRow,
    JobStatus,
    ListenerCursorRow,
    SharedJobRow,
    events,
    listener_cursors,
    receiver_jobs,
    shared_jobs,
    streams,
)

REQUESTED_OF = "requested_of"
"""The attribute of a job that waits for the process of the shared job of this name; None once it is adopted."""

LIVE_RECEIVERS = (ReceiverState.SCHEDULED, ReceiverState.STARTING, ReceiverState.RUNNING, ReceiverState.STOPPING)


class Jobs(Repository):
    """Grants, renews and ends the receiver job's lease.

    A lease that has expired stays with its holder until another job acquires one: the epoch fences, not the time.
    """

    def acquire(
        self,
        stream_name: str,
        *,
        holder: str,
        lease_ms: int,
        versions: Mapping[str, str] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> JobLease:
        """Begin the stream's next receiver job. Writes of the previous job are refused from now on.

        Args:
            holder: a unique name of the process.
            attributes: JSON values such as pid, host, ui_url; never a secret.

        Raises:
            LeaseHeldError: a job that has not ended holds a live lease.
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            # By itself, since a refusal changes nothing: the lease of a job that died while the clock was ahead.
            take_back(connection, locked)
        with self._database.write_stream(stream_name) as (connection, locked):
            now_ms, epoch = locked.now_ms, locked.row.job_epoch + 1
            previous = _job(connection, stream_name, locked.row.job_epoch)
            if previous is not None and previous.alive(now_ms):
                raise held(previous)
            _end_previous(connection, previous, now_ms, holder)
            lease = JobLease(stream_name, epoch, holder, lease_ms, now_ms + lease_ms)
            connection.execute(
                insert(receiver_jobs).values(
                    stream=stream_name,
                    epoch=epoch,
                    holder=holder,
                    state=JobState.STARTING,
                    acquired_at_ms=now_ms,
                    lease_ms=lease_ms,
                    lease_until_ms=lease.lease_until_ms,
                    heartbeat_ms=now_ms,
                    versions=dict(versions or {}),
                    attributes=dict(attributes or {}),
                )
            )
            connection.execute(update(streams).where(streams.c.name == stream_name).values(job_epoch=epoch))
            record(connection, stream_name, now_ms, EventKind.JOB_STARTED, {"epoch": epoch, "holder": holder})
            return lease

    def requests(self, shared_job: str) -> list[JobRow]:
        """Return the live jobs that wait for the process of this shared job, the oldest first."""
        query = select(receiver_jobs).join(
            streams, (streams.c.name == receiver_jobs.c.stream) & (streams.c.job_epoch == receiver_jobs.c.epoch)
        )
        with self._database.read() as connection:
            now_ms = self._database.now_ms(connection)
            jobs = JobRow.rows(connection, query.where(receiver_jobs.c.state == JobState.STARTING))
        waiting = [job for job in jobs if job.attributes.get(REQUESTED_OF) == shared_job and job.alive(now_ms)]
        return sorted(waiting, key=lambda job: (job.acquired_at_ms, job.stream))

    def adopt(self, request: JobRow, *, holder: str, lease_ms: int, attributes: Mapping[str, Any]) -> JobLease:
        """Take over a job that was acquired on behalf of a shared job's process, as its holder.

        Args:
            attributes: added to those of the request.

        Raises:
            LeaseLostError: the job has ended, another one has begun, or another process has adopted it.
        """
        with self._database.write_stream(request.stream) as (connection, locked):
            job = _job(connection, request.stream, locked.row.job_epoch)
            if job is None or job.epoch != request.epoch or job.holder != request.holder or job.state.ended:
                raise _lost(JobLease(request.stream, request.epoch, holder, lease_ms, 0))
            lease = JobLease(request.stream, request.epoch, holder, lease_ms, locked.now_ms + lease_ms)
            connection.execute(
                _this(request.stream, request.epoch).values(
                    holder=holder,
                    lease_ms=lease_ms,
                    lease_until_ms=lease.lease_until_ms,
                    heartbeat_ms=locked.now_ms,
                    attributes={**job.attributes, **attributes, REQUESTED_OF: None},
                )
            )
            return lease

    def renew(self, lease: JobLease, *, attributes: Mapping[str, Any] | None = None) -> JobStatus:
        """Extend the lease and add to the attributes. The returned status says whether the job must stop.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        with self._database.write() as connection:
            return self._touch(connection, lease, {}, attributes)

    def update(
        self,
        lease: JobLease,
        *,
        state: JobState | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> JobStatus:
        """Set the given values, add to the attributes, and extend the lease. To end the job call `release`.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        wanted = JobState(state) if state is not None else None
        if wanted is not None and wanted.ended:
            raise LedgerError(f"A job ends by release, not by an update to {wanted}.")
        values: dict[str, Any] = {}
        with self._database.write_stream(lease.stream) as (connection, locked):
            if wanted is not None:
                values["state"] = wanted
                record(
                    connection,
                    lease.stream,
                    locked.now_ms,
                    EventKind.JOB_STATE_CHANGED,
                    {"epoch": lease.epoch, "state": wanted.value},
                )
            return self._touch(connection, lease, values, attributes)

    def request_stop(
        self,
        stream_name: str,
        reason: str,
        *,
        epoch: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> JobRow | None:
        """Ask the current job to stop gracefully. Returns its row, or None if it has ended already.

        A second request changes nothing.

        Args:
            epoch: ask only the job of this epoch; returns None if another job has begun.
            attributes: added to the job's attributes by the first request.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            job = _job(connection, stream_name, locked.row.job_epoch)
            if job is None or job.state.ended or epoch not in (None, job.epoch):
                return None
            if job.stop_requested_at_ms is None:
                values = {"stop_requested_at_ms": locked.now_ms, "stop_reason": reason}
                if attributes:
                    values["attributes"] = {**job.attributes, **attributes}
                connection.execute(_this(stream_name, job.epoch).values(**values))
                payload = {"epoch": job.epoch, "reason": reason}
                record(connection, stream_name, locked.now_ms, EventKind.JOB_STOP_REQUESTED, payload)
            return _job(connection, stream_name, job.epoch)

    def note(self, stream_name: str, epoch: int, attributes: Mapping[str, Any]) -> None:
        """Add to a job's attributes on behalf of another process. The lease does not change."""
        with self._database.write_stream(stream_name) as (connection, _):
            query = select(receiver_jobs.c.attributes).where(
                receiver_jobs.c.stream == stream_name, receiver_jobs.c.epoch == epoch
            )
            known = connection.execute(query.with_for_update()).scalar_one_or_none()
            if known is not None:
                connection.execute(_this(stream_name, epoch).values(attributes={**known, **attributes}))

    def release(self, lease: JobLease, state: JobState | str = JobState.STOPPED, error: str | None = None) -> None:
        """End the job, and with it its receivers. A second call changes nothing.

        Raises:
            LeaseLostError: another job has begun.
        """
        ended = JobState(state)
        if not ended.ended:
            raise LedgerError(f"A job ends as stopped or failed, not as {ended}.")
        with self._database.write_stream(lease.stream) as (connection, locked):
            job = _job(connection, lease.stream, lease.epoch)
            if job is None or job.holder != lease.holder or locked.row.job_epoch != lease.epoch:
                raise _lost(lease)
            if not job.state.ended:
                _end(connection, lease.stream, lease.epoch, now_ms=locked.now_ms, state=ended, error=error)

    def end_dead(self, stream_name: str, epoch: int, error: str) -> None:
        """End a job as failed, and with it its receivers, on behalf of its process, which has ended without a report.

        Changes nothing if the job has ended already, or another one has begun.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            job = _job(connection, stream_name, locked.row.job_epoch)
            if job is not None and job.epoch == epoch and not job.state.ended:
                _end(connection, stream_name, epoch, now_ms=locked.now_ms, state=JobState.FAILED, error=error)

    def current(self, stream_name: str) -> JobRow | None:
        """Return the newest job, in any state; None before the first."""
        jobs = self.page(stream_name, limit=1)
        return jobs[0] if jobs else None

    def page(self, stream_name: str, limit: int = 20) -> list[JobRow]:
        """Return the stream's newest ``limit`` jobs, newest first."""
        query = select(receiver_jobs).where(receiver_jobs.c.stream == stream_name)
        return self._rows(JobRow, query.order_by(receiver_jobs.c.epoch.desc()).limit(limit))

    def _touch(
        self, connection: Connection, lease: JobLease, values: dict[str, Any], attributes: Mapping[str, Any] | None
    ) -> JobStatus:
        row = connection.execute(
            select(receiver_jobs, streams.c.job_epoch)
            .join(streams, streams.c.name == receiver_jobs.c.stream)
            .where(receiver_jobs.c.stream == lease.stream, receiver_jobs.c.epoch == lease.epoch)
            .with_for_update(of=receiver_jobs)
        ).one_or_none()
        if row is None or row.holder != lease.holder or row.job_epoch != lease.epoch or row.state.ended:
            raise _lost(lease)
        now_ms = self._database.now_ms(connection)
        if attributes:
            values["attributes"] = {**row.attributes, **attributes}
        lease_until_ms = now_ms + lease.lease_ms
        connection.execute(
            _this(lease.stream, lease.epoch).values(heartbeat_ms=now_ms, lease_until_ms=lease_until_ms, **values)
        )
        stopping = row.stop_requested_at_ms is not None
        return JobStatus(stopping, row.stop_reason, lease_until_ms, now_ms)


def require_job(connection: Connection, locked: LockedStream, lease: JobLease) -> None:
    """Check, under the stream's lock, that the job's epoch is current and the job has not ended."""
    job = _job(connection, lease.stream, lease.epoch)
    if job is None or job.holder != lease.holder or locked.row.job_epoch != lease.epoch or job.state.ended:
        raise _lost(lease)


def job_of(connection: Connection, locked: LockedStream) -> JobRow | None:
    """Return the stream's newest job, under the stream's lock."""
    return _job(connection, locked.row.name, locked.row.job_epoch)


def _job(connection: Connection, stream_name: str, epoch: int) -> JobRow | None:
    query = select(receiver_jobs).where(receiver_jobs.c.stream == stream_name, receiver_jobs.c.epoch == epoch)
    return JobRow.row(connection, query)


def _this(stream_name: str, epoch: int) -> Any:
    return update(receiver_jobs).where(receiver_jobs.c.stream == stream_name, receiver_jobs.c.epoch == epoch)


def _end_previous(connection: Connection, previous: JobRow | None, now_ms: int, holder: str) -> None:
    if previous is not None and not previous.state.ended:
        silent_ms = now_ms - previous.heartbeat_ms
        error = f"no heartbeat for {silent_ms} ms; {holder} took over"
        _end(connection, previous.stream, previous.epoch, now_ms=now_ms, state=JobState.FAILED, error=error)


def _end(
    connection: Connection, stream_name: str, epoch: int, *, now_ms: int, state: JobState, error: str | None
) -> None:
    """End a job. Its receivers can write no more, so their segments are closed."""
    values: dict[str, Any] = {"state": state, "ended_at_ms": now_ms}
    if error is not None:
        values["error"] = error
    connection.execute(_this(stream_name, epoch).values(**values))
    live = (receivers.c.stream == stream_name, receivers.c.state.in_(LIVE_RECEIVERS))
    lost_error = f"its job (epoch {epoch}) {state.value}"
    lost = [
        {
            "receiver": str(ReceiverId(stream_name, row.input_id, row.receiver_index)),
            "epoch": row.epoch,
            "error": lost_error,
        }
        for row in connection.execute(select(receivers).where(*live))
    ]
    connection.execute(
        update(receivers)
        .where(*live)
        .values(
            state=ReceiverState.LOST,
            paused_reason=None,
            last_error=lost_error,
            last_error_at_ms=now_ms,
            last_error_stack=None,
        )
    )
    record_all(connection, stream_name, now_ms, EventKind.RECEIVER_FAILED, lost)
    connection.execute(
        update(segments)
        .where(segments.c.stream == stream_name, segments.c.removed_at_ms.is_(None), segments.c.closed_at_ms.is_(None))
        .values(**closing_values(now_ms))
    )
    kind = EventKind.JOB_FAILED if state is JobState.FAILED else EventKind.JOB_STOPPED
    record(connection, stream_name, now_ms, kind, {"epoch": epoch, "error": error})


def held(job: JobRow) -> LeaseHeldError:
    return LeaseHeldError(
        f"The receiver job of stream {job.stream!r} is held by {job.holder} (epoch {job.epoch}{_process(job)}) since "
        f"{time_text(job.acquired_at_ms)}; its lease lasts until {time_text(job.lease_until_ms)} and is renewed "
        "while it lives.",
        holder=job.holder,
        since_ms=job.acquired_at_ms,
        until_ms=job.lease_until_ms,
        remedy=f"To take over, stop it by `headrace streams stop {job.stream}` and start yours when it has drained. If "
        "its process is dead or hangs, start yours when the lease is out: whatever the old one does then is refused.",
    )


def _process(job: JobRow | SharedJobRow) -> str:
    """Where the job runs, as the end of a text; empty if it has not reported that."""
    host, pid = job.attributes.get("host"), job.attributes.get("pid")
    return f", process {pid} on {host}" if host and pid else ""


def _lost(lease: JobLease) -> LeaseLostError:
    return LeaseLostError(
        f"Job {lease.holder} (epoch {lease.epoch}) no longer holds stream {lease.stream!r}.",
        remedy="Stop it: another job has begun, or this one was ended.",
    )


class SharedJobs(Repository):
    """Grants, renews and ends the leases of shared jobs."""

    def acquire(
        self, name: str, *, holder: str, lease_ms: int, attributes: Mapping[str, Any] | None = None
    ) -> SharedJobRow:
        """Begin the next process of this name; or, if this holder has the lease, extend it and set its attributes.

        So the task that starts the process acquires the lease, and the process takes it over by the same holder.

        Raises:
            LeaseHeldError: another holder has a live lease.
        """
        try:
            return self._acquire(name, holder, lease_ms, dict(attributes or {}))
        except LedgerConflictError:
            # Another process inserted the row between our read and our insert: now it can be locked.
            return self._acquire(name, holder, lease_ms, dict(attributes or {}))

    def _acquire(self, name: str, holder: str, lease_ms: int, attributes: dict[str, Any]) -> SharedJobRow:
        with self._database.write() as connection:
            # By itself, since a refusal changes nothing.
            shorten_leases(connection, shared_jobs, self._database.now_ms(connection), _named(name))
        with self._database.write() as connection:
            before, now_ms = _locked(connection, name), self._database.now_ms(connection)
            is_ours = before is not None and before.holder == holder and before.ended_at_ms is None
            if before is not None and before.alive(now_ms) and not is_ours:
                raise _shared_held(before)
            values = {
                "holder": holder,
                "lease_ms": lease_ms,
                "lease_until_ms": now_ms + lease_ms,
                "attributes": attributes,
                "ended_at_ms": None,
            }
            if before is None:
                connection.execute(insert(shared_jobs).values(name=name, epoch=1, acquired_at_ms=now_ms, **values))
            elif is_ours:
                connection.execute(_shared(name).values(**values))
            else:
                connection.execute(_shared(name).values(epoch=before.epoch + 1, acquired_at_ms=now_ms, **values))
            return SharedJobRow.from_row(connection.execute(select(shared_jobs).where(_named(name))).one())

    def renew(self, lease: SharedJobRow) -> None:
        """Extend the lease.

        Raises:
            LeaseLostError: another process has begun, or this one has ended.
        """
        with self._database.write() as connection:
            row = _locked(connection, lease.name)
            if row is None or row.epoch != lease.epoch or row.ended_at_ms is not None:
                raise LeaseLostError(
                    f"The process {lease.holder} (epoch {lease.epoch}) is no longer the shared job {lease.name!r}.",
                    remedy="Another one has begun, or this one was ended. It takes no more streams.",
                )
            until_ms = self._database.now_ms(connection) + lease.lease_ms
            connection.execute(_shared(lease.name).values(lease_until_ms=until_ms))

    def end(self, name: str, epoch: int) -> None:
        """End the process of this epoch. Changes nothing if it has ended, or another one has begun."""
        with self._database.write() as connection:
            row = _locked(connection, name)
            if row is not None and row.epoch == epoch and row.ended_at_ms is None:
                connection.execute(_shared(name).values(ended_at_ms=self._database.now_ms(connection)))

    def current(self, name: str) -> SharedJobRow | None:
        """Return the newest process of this name, live or ended; None before the first."""
        with self._database.read() as connection:
            return SharedJobRow.row(connection, select(shared_jobs).where(_named(name)))


def _named(name: str) -> Any:
    return shared_jobs.c.name == name


def _shared(name: str) -> Any:
    return update(shared_jobs).where(_named(name))


def _locked(connection: Connection, name: str) -> SharedJobRow | None:
    return SharedJobRow.row(connection, select(shared_jobs).where(_named(name)).with_for_update())


def _shared_held(row: SharedJobRow) -> LeaseHeldError:
    return LeaseHeldError(
        f"The shared job {row.name!r} is held by {row.holder} (epoch {row.epoch}{_process(row)}) since "
        f"{time_text(row.acquired_at_ms)}; its lease lasts until {time_text(row.lease_until_ms)}.",
        holder=row.holder,
        since_ms=row.acquired_at_ms,
        until_ms=row.lease_until_ms,
        remedy="A process ends by itself when none of its streams runs any more.",
    )


class ListenerCursors(Repository):
    """A cursor for each listener, by its name. Only the stream's present receiver job moves them."""

    def open(
        self, lease: JobLease, listeners: Collection[str], new_after_id: int | None = None
    ) -> dict[str, ListenerCursorRow]:
        """Return the cursors of these listeners. A new listener begins after the event ``new_after_id``, by default
        after the newest.

        The returned ``missed`` are those since the last call.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        with self._database.write_stream(lease.stream) as (connection, locked):
            require_job(connection, locked, lease)
            event_id = new_after_id
            if event_id is None:
                newest = select(events.c.event_id).where(events.c.stream == lease.stream)
                newest = newest.order_by(events.c.event_id.desc()).limit(1)
                event_id = connection.execute(newest).scalar_one_or_none() or 0
            query = select(listener_cursors).where(listener_cursors.c.stream == lease.stream)
            cursors = {row.listener: ListenerCursorRow.from_row(row) for row in connection.execute(query)}
            for name in listeners:
                if name not in cursors:
                    cursors[name] = ListenerCursorRow(lease.stream, name, event_id, 0, locked.now_ms)
                    connection.execute(insert(listener_cursors).values(**cursors[name].to_columns()))
            seen = (listener_cursors.c.stream == lease.stream, listener_cursors.c.listener.in_(listeners))
            connection.execute(update(listener_cursors).where(*seen).values(missed=0))
            return {name: cursors[name] for name in listeners}

    def save(self, lease: JobLease, event_ids: Mapping[str, int]) -> None:
        """Move the cursors of these listeners to the last event that each has got.

        Raises:
            LeaseLostError: another job has begun, or this one has ended.
        """
        with self._database.write_stream(lease.stream) as (connection, locked):
            require_job(connection, locked, lease)
            for name, event_id in event_ids.items():
                this = (listener_cursors.c.stream == lease.stream, listener_cursors.c.listener == name)
                values = {"event_id": event_id, "updated_at_ms": locked.now_ms}
                connection.execute(update(listener_cursors).where(*this).values(**values))
