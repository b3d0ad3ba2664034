"""Manages the leases of jobs that streams share: one process for each name, which runs these streams' receiver jobs.

Nothing that a stream stores depends on this lease: each stream has its own, by which it is fenced. This lease only
keeps two tasks from starting two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from headrace.clock import time_text
from headrace.ledger.clock_corrections import shorten_leases
from headrace.ledger.database import Repository
from headrace.ledger.errors import LeaseHeldError, LeaseLostError, LedgerConflictError
from headrace.ledger.tables import SharedJobRow, shared_jobs


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
                raise _held(before)
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
                connection.execute(_this(name).values(**values))
            else:
                connection.execute(_this(name).values(epoch=before.epoch + 1, acquired_at_ms=now_ms, **values))
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
            connection.execute(_this(lease.name).values(lease_until_ms=until_ms))

    def end(self, name: str, epoch: int) -> None:
        """End the process of this epoch. Changes nothing if it has ended, or another one has begun."""
        with self._database.write() as connection:
            row = _locked(connection, name)
            if row is not None and row.epoch == epoch and row.ended_at_ms is None:
                connection.execute(_this(name).values(ended_at_ms=self._database.now_ms(connection)))

    def current(self, name: str) -> SharedJobRow | None:
        """Return the newest process of this name, live or ended; None before the first."""
        with self._database.read() as connection:
            row = connection.execute(select(shared_jobs).where(_named(name))).one_or_none()
            return None if row is None else SharedJobRow.from_row(row)


def _named(name: str) -> Any:
    return shared_jobs.c.name == name


def _this(name: str) -> Any:
    return update(shared_jobs).where(_named(name))


def _locked(connection: Connection, name: str) -> SharedJobRow | None:
    row = connection.execute(select(shared_jobs).where(_named(name)).with_for_update()).one_or_none()
    return None if row is None else SharedJobRow.from_row(row)


def _held(row: SharedJobRow) -> LeaseHeldError:
    host, pid = row.attributes.get("host"), row.attributes.get("pid")
    where = f", process {pid} on {host}" if host and pid else ""
    return LeaseHeldError(
        f"The shared job {row.name!r} is held by {row.holder} (epoch {row.epoch}{where}) since "
        f"{time_text(row.acquired_at_ms)}; its lease lasts until {time_text(row.lease_until_ms)}.",
        holder=row.holder,
        since_ms=row.acquired_at_ms,
        until_ms=row.lease_until_ms,
        remedy="A process ends by itself when none of its streams runs any more.",
    )
