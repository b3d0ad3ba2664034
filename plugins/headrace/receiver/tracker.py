"""Starts and watches the receivers and assigns partitions to them, in the driver of the receiver job.

One loop does everything, including the renewal of the job's lease, so a tracker that hangs is replaced. Only queries to
Kafka run beside it, since they may take long. All decisions are in the ledger: a new tracker continues where the last
one stopped. What the receivers report is added up, and kept over time as samples in the ledger.

The job's sign of life is a file in the stream's folder. It shows that the job runs to a process that has lost the
ledger or uses another one: a job that receives nothing writes no block, and without batches no checkpoint. The job
rewrites the file every third of its lease while its ledger answers, and deletes it when it has stopped.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.errors import LeaseLostError, LedgerUnavailableError
from headrace.ledger.receiving.tables import ReceiverRow
from headrace.ledger.states import EventKind
from headrace.ledger.tables import JobLease, JobStatus, SampleRow
from headrace.receiver.health import INPUTS, InputHealth, numbers
from headrace.receiver.heartbeat import LEASE_MS
from headrace.receiver.partitioning import Discoverer, Discovery, Partitioning, discoverer_of, end_removed_inputs
from headrace.receiver.rates import RateController
from headrace.receiver.tracked_receiver import HANG_SECONDS, RESTART_SECONDS, ReceiverLauncher, TrackedReceiver
from headrace.stream.inputs import Input
from headrace.stream_context import StreamContext
from headrace.stream_folder import LedgerSetBackError
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.log_storage import LogStorage

logger = logging.getLogger(__name__)


PATH = "receiver-job.json"
"""Below the stream's folder."""

# How long the end of a job waits until its sign is deleted. If it is not, a recovery waits for the lease.
_DELETE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class JobSign:
    """A sign of life: the receiver job was alive at ``written_ms``, by its ledger's clock. Its lease lasts for
    ``lease_ms``. ``epoch`` is that of the job."""

    written_ms: int
    lease_ms: int
    epoch: int = 0


def write_sign(folder: LogStorage, lease: JobLease, now_ms: int) -> None:
    """Write the sign of the job that holds ``lease``. ``now_ms``: the ledger's time. Raises StorageError, OSError."""
    content = {"epoch": lease.epoch, "written_ms": now_ms, "lease_ms": lease.lease_ms}
    folder.write_atomically(PATH, json.dumps(content).encode())


def find_sign(folder: LogStorage) -> JobSign | None:
    """Return the sign in the stream's folder. None: there was no job, or the last one has stopped.

    Raises:
        ValueError: the file is damaged.
        StorageError, OSError: the store cannot be read.
    """
    try:
        sign = json.loads(folder.read(PATH))
    except StoredFileMissingError:
        return None
    try:
        return JobSign(int(sign["written_ms"]), int(sign["lease_ms"]), int(sign.get("epoch", 0)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{PATH} is not the sign of life of a receiver job: {error!r}") from error


class JobSignWriter:
    """Keeps the sign of a running job, and the mark of its ledger. A thread writes, so that a slow store does not delay
    the job's lease."""

    def __init__(self, context: StreamContext, lease: JobLease) -> None:
        self._context = context
        self._lease = lease
        self._next_write = 0.0
        self._writing: Future[None] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-job-sign")

    def write_if_due(self, now_ms: int) -> None:
        """Begin to write the sign every third of the lease. ``now_ms``: the ledger's time, as it has just answered.

        Raises:
            LedgerSetBackError: the last time, the ledger was older than the folder: it was replaced meanwhile.
        """
        if self._writing is not None and self._writing.done():
            self._writing.result()
        now = self._context.clock.monotonic()
        if now < self._next_write or not (self._writing is None or self._writing.done()):
            return
        self._next_write = now + self._lease.lease_ms / 3000
        self._writing = self._pool.submit(self._write, now_ms)

    def delete(self) -> None:
        """Delete the sign: the job has stopped, and all of its receivers have ended."""
        try:
            self._pool.submit(self._end).result(_DELETE_SECONDS)
        except (HeadraceError, OSError) as error:
            logger.warning("the job's sign of life %s/%s was not deleted: %s", self._context.storage.url, PATH, error)

    def close(self) -> None:
        """Write no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self) -> None:
        self._context.storage.mark.leave()
        self._context.storage.delete(PATH)

    def _write(self, now_ms: int) -> None:
        try:
            self._context.storage.mark.leave()
            write_sign(self._context.storage, self._lease, now_ms)
        except LedgerSetBackError:
            raise
        except (HeadraceError, OSError) as error:
            logger.warning("the job's sign of life %s/%s was not written: %s", self._context.storage.url, PATH, error)


SAMPLE_SECONDS = 10.0
"""The interval of samples. One row each ten seconds is 8,640 a day, about 700 KB."""


class Sampler:
    """Adds a sample each ten seconds. Used by the tracker's loop."""

    def __init__(self, context: StreamContext) -> None:
        self._context = context
        self._next = 0.0

    def sample(self, receivers: Collection[ReceiverRow], now_ms: int) -> None:
        """Add a sample if one is due. Raises LedgerUnavailableError; the next one is then due ten seconds later."""
        now = self._context.clock.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        ledger, name = self._context.ledger, self._context.name
        sums = numbers(receivers, now_ms)
        ledger.samples.add(
            SampleRow(
                stream=name,
                at_ms=now_ms,
                input_rate=sums.input_rate,
                # The lag of some partitions would look like the lag of all.
                lag=None if sums.lag_unknown else sums.lag,
                lag_seconds=sums.lag_seconds,
                queue_bytes=sums.queue_bytes,
                paused=sums.paused,
                log_bytes=ledger.segments.stored_bytes(name),
            )
        )


STOP_REQUEST_PATH = "stop-request.json"
"""Below the stream's folder: see `write_stop_request`."""

TICK_SECONDS = 0.5
METADATA_SECONDS = 10.0
# Receivers must hold every task slot at this many checks in a row, one each METADATA_SECONDS, before one is ended.
_CROWDED_POLLS = 3
# While Kafka does not answer it is queried more often, so that its return is noticed soon.
_OUTAGE_POLL_SECONDS = 2.0
# The problems that `InputHealth` keeps.
_HEALTH = frozenset({"kafka", "missing"})
# A graceful stop waits this long for receivers to drain. Then they are cancelled; this is safe, records are read again.
STOP_SECONDS = 60.0
STOP_POLL_SECONDS = 5.0
"""While the ledger does not answer: how often the job looks in the stream's folder for a request to stop."""


class TrackerEnd(StrEnum):
    """How a tracker ended."""

    STOPPED = "stopped"
    """A stop was requested; every receiver has drained and ended."""
    FORCED = "forced"
    """A stop was requested; some receivers did not end in time and were cancelled."""
    WITHOUT_LEDGER = "without_ledger"
    """A file in the stream's folder requested the stop while the ledger did not answer; receivers were cancelled."""
    LOST = "lost"
    """Another job has taken the stream over."""


@dataclass(frozen=True, slots=True)
class TrackerReport:
    """``reason`` says who requested the stop, or what was lost."""

    end: TrackerEnd
    reason: str | None = None


class ReceiverTracker:
    """Keeps a stream's receivers running, under a JobLease that the caller acquires before and releases after `run`."""

    def __init__(
        self,
        context: StreamContext,
        launcher: ReceiverLauncher,
        job_lease: JobLease,
        *,
        discoverer: Callable[[Input], Discoverer] | None = None,
        receiver_lease_ms: int = LEASE_MS,
        restart_seconds: float = RESTART_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        metadata_seconds: float = METADATA_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        stream = context.stream
        self._context = context
        self._stream = stream
        self._ledger = context.ledger
        self._clock = context.clock
        self._launcher = launcher
        self._lease = job_lease
        self._metadata_seconds = metadata_seconds
        self._stop_seconds = stop_seconds
        make = discoverer or (lambda source: discoverer_of(source, stream))
        self._discoverers = {source.id: make(source) for source in stream.inputs}
        self._partitioning = {
            source.id: Partitioning(context, source, job_lease, grace_ms=receiver_lease_ms) for source in stream.inputs
        }
        text = stream.model_dump_json()
        self._receivers = [
            TrackedReceiver(
                text,
                ReceiverId(stream.name, source.id, index),
                job_lease,
                context.ledger.receivers,
                launcher,
                lease_ms=receiver_lease_ms,
                restart_seconds=restart_seconds,
                hang_seconds=hang_seconds,
            )
            for source in stream.inputs
            for index in range(source.receivers)
        ]
        self._rates = RateController(context, job_lease)
        self._sampler = Sampler(context)
        self._sign = JobSignWriter(context, job_lease)
        custom = [source.id for source in stream.inputs if source.in_kafka is None]
        self._health = InputHealth((source.id for source in stream.inputs), custom=custom)
        self._now_ms = 0
        self._discoveries: dict[str, Future[Discovery]] = {}
        self._next_discovery: dict[str, float] = {}
        self._reported: dict[str, str] = {}
        self._next_slot_check = 0.0
        self._crowded_polls = 0
        self._slot_seconds = metadata_seconds
        self._has_begun = False
        self._next_stop_poll = 0.0
        self._pool = ThreadPoolExecutor(max_workers=len(stream.inputs), thread_name_prefix="headrace-discovery")

    def run(self, stop: threading.Event | None = None) -> TrackerReport:
        """Keep the receivers running until the job is asked to stop (in the ledger, by ``stop``, or by a file while the
        ledger does not answer) or loses its lease.

        Raises KeyVersionsError, LedgerSetBackError and unexpected errors, after cancelling the receivers; the caller
        then releases the lease as failed.
        """
        stop = stop or threading.Event()
        try:
            while True:
                status = self._renew()
                if stop.is_set() or (status is not None and status.stop_requested):
                    return self._stop(status)
                if status is None and (reason := self._stop_request()) is not None:
                    logger.error("the receiver job of %s ends without its ledger: %s", self._stream.name, reason)
                    return TrackerReport(TrackerEnd.WITHOUT_LEDGER, reason)
                if status is not None and not self._has_begun:
                    self._tolerantly(self._begin)
                rows = self._rows() if status is not None and self._has_begun else None
                if status is None or rows is None:
                    self._assume_alive()
                else:
                    self._tolerantly(partial(self._keep_going, rows, status.now_ms))
                    self._assign_partitions(rows, status.now_ms)
                    self._keep_slot_for_batches()
                    self._tolerantly(self._rates.follow)
                    self._tolerantly(partial(self._sampler.sample, rows, status.now_ms))
                self._clock.wait(stop, TICK_SECONDS)
        except LeaseLostError as error:
            logger.error("the receiver job of %s ends: %s", self._stream.name, error)
            return TrackerReport(TrackerEnd.LOST, str(error))
        finally:
            for receiver in self._receivers:
                receiver.cancel()
            self._sign.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    # -- the loop's steps ------------------------------------------------------------------------------------------

    def _renew(self) -> JobStatus | None:
        """Renew the job's lease. Returns None while the ledger does not answer: the lease stays valid until another job
        acquires it."""
        try:
            attributes = {
                "receivers": self._summary(),
                # What the inputs' health has is left out.
                "troubles": sorted(text for key, text in self._reported.items() if key.split("/")[1] not in _HEALTH),
                # The stream's definition may change meanwhile; the receivers keep using this one.
                "batch_by": self._stream.batch_by,
                INPUTS: self._health.to_json(),
            }
            status = self._ledger.jobs.renew(self._lease, attributes=attributes)
        except LedgerUnavailableError as error:
            logger.warning("the receiver job's lease was not renewed, because the ledger does not answer: %s", error)
            return None
        if status.now_ms < self._now_ms:
            # The ledger's clock was ahead.
            self._tolerantly(self._correct_clock)
        self._now_ms = status.now_ms
        self._sign.write_if_due(status.now_ms)
        return status

    def _correct_clock(self) -> None:
        moved = self._ledger.clock_corrections.apply(self._stream.name)
        if moved is not None:
            logger.warning(
                "the ledger's clock was ahead: %d blocks with %d records have moved back to batch time %s",
                moved.blocks,
                moved.records,
                time_text(moved.batch_time_ms),
            )

    def _summary(self) -> dict[str, dict[str, object]]:
        return {
            str(receiver.receiver_id): {
                "running": receiver.running,
                "starts": receiver.starts,
                "error": receiver.last_error,
            }
            for receiver in self._receivers
        }

    def _stop_request(self) -> str | None:
        if self._clock.monotonic() < self._next_stop_poll:
            return None
        self._next_stop_poll = self._clock.monotonic() + STOP_POLL_SECONDS
        acquired_ms = self._lease.lease_until_ms - self._lease.lease_ms
        return find_stop_request(self._context.storage, since_ms=max(self._now_ms, acquired_ms))

    def _begin(self) -> None:
        for before in self._ledger.jobs.page(self._stream.name, limit=2):
            if before.epoch != self._lease.epoch:
                self._health.inherit(before.attributes)
        self._correct_clock()
        end_removed_inputs(self._context, self._lease)
        for partitioning in self._partitioning.values():
            partitioning.begin()
        self._rates.begin()
        self._has_begun = True

    def _rows(self) -> list[ReceiverRow] | None:
        """Return the receivers from the ledger; None while it does not answer."""
        rows: list[list[ReceiverRow]] = []
        self._tolerantly(lambda: rows.append(self._ledger.receivers.all(self._stream.name)))
        return rows[0] if rows else None

    def _assume_alive(self) -> None:
        for receiver in self._receivers:
            receiver.assume_alive(self._clock.monotonic())

    def _keep_going(self, rows: Collection[ReceiverRow], now_ms: int) -> None:
        live = {row.receiver_id for row in rows if self._is_live(row, now_ms)}
        for receiver in self._receivers:
            ended = receiver.keep_going(self._clock.monotonic(), alive=receiver.receiver_id in live)
            if ended is not None:
                logger.warning("%s", ended)
                payload = {"receiver": str(receiver.receiver_id), "error": ended, "starts": receiver.starts}
                self._tolerantly(partial(self._event, payload))

    def _keep_slot_for_batches(self) -> None:
        """Cancel one receiver if the receivers hold every task slot; it starts again when there is one more.

        The last receiver keeps running: without receivers the log gets no records, and batches have nothing to do. When
        an executor is lost, Spark moves its task to another one for a moment, so a single check proves nothing.
        """
        now = self._clock.monotonic()
        if now < self._next_slot_check:
            return
        self._next_slot_check = now + self._slot_seconds
        crowding = self._launcher.crowding()
        self._crowded_polls = 0 if crowding is None else self._crowded_polls + 1
        if crowding is not None and self._crowded_polls < _CROWDED_POLLS:
            # The last report stays valid, for example the one from before a receiver was cancelled.
            return
        self._tolerantly(partial(self._report, "all", "slots", crowding))
        running = [receiver for receiver in self._receivers if receiver.running]
        if crowding is not None and len(running) > 1:
            running[-1].cancel()
            self._crowded_polls = 0

    def _assign_partitions(self, rows: Collection[ReceiverRow], now_ms: int) -> None:
        """Assign partitions to live receivers, and write discovered topics to the ledger."""
        live = [row.receiver_id for row in rows if self._is_live(row, now_ms)]
        for source in self._stream.inputs:
            indexes = {row.index for row in live if row.input_id == source.id}
            self._tolerantly(partial(self._follow_topics, source))
            self._tolerantly(partial(self._partitioning[source.id].rebalance, indexes, now_ms))

    def _is_live(self, row: ReceiverRow, now_ms: int) -> bool:
        return row.job_epoch == self._lease.epoch and row.alive(now_ms)

    def _follow_topics(self, source: Input) -> None:
        now = self._clock.monotonic()
        discovering = self._discoveries.get(source.id)
        if discovering is None:
            if now >= self._next_discovery.get(source.id, 0.0):
                known = self._partitioning[source.id].known()
                self._discoveries[source.id] = self._pool.submit(self._discoverers[source.id].discover, known)
            return
        if not discovering.done():
            return
        del self._discoveries[source.id]
        failure = discovering.exception()
        seconds = self._metadata_seconds if failure is None else min(self._metadata_seconds, _OUTAGE_POLL_SECONDS)
        self._next_discovery[source.id] = now + seconds
        if failure is not None:
            self._health.failed(source.id, str(failure))
            self._report(source.id, "kafka", f"Input {source.id}: {failure}")
            return
        discovery = discovering.result()
        missing = {topic: f"it does not exist at {discovery.servers}" for topic in discovery.missing}
        self._health.answered(source.id, self._now_ms, {**missing, **discovery.refused})
        self._report_findings(source, discovery)
        self._partitioning[source.id].apply(discovery)

    def _report_findings(self, source: Input, discovery: Discovery) -> None:
        self._report(source.id, "kafka", None)
        missing = ", ".join(discovery.missing)
        self._report(
            source.id,
            "missing",
            f"Topics of input {source.id} do not exist at {discovery.servers}: {missing}" if missing else None,
        )
        self._report(source.id, "problems", "; ".join(discovery.problems) or None)
        kafka = source.in_kafka
        if discovery.foreign is None or kafka is None:
            return
        members = ", ".join(discovery.foreign)
        group = self._stream.group_of(kafka)
        self._report(
            source.id,
            "foreign",
            f"Consumer group {group} has members that are not headrace's: {members}. So headrace's commits "
            "fail, and lag tools show wrong numbers; no stored record is affected. Give the members, or the input, "
            "another group."
            if members
            else None,
        )

    # -- events ----------------------------------------------------------------------------------------------------

    def _report(self, input_id: str, about: str, problem: str | None) -> None:
        """Append an event when a problem begins or changes, but not while it lasts."""
        key = f"{input_id}/{about}"
        if problem is None:
            if self._reported.pop(key, None) is not None:
                logger.info("input %s: the problem %r is over", input_id, about)
            return
        if self._reported.get(key) != problem:
            logger.error("%s", problem)
            self._event({"input": input_id, "error": problem})
            self._reported[key] = problem

    def _event(self, payload: Mapping[str, object]) -> None:
        self._ledger.events.append(self._stream.name, EventKind.RECEIVER_ERROR, payload)

    def _tolerantly(self, step: Callable[[], object]) -> None:
        """Run ``step``; if the ledger does not answer, the next round repeats it."""
        try:
            step()
        except LedgerUnavailableError as error:
            logger.warning(
                "the ledger does not answer, so the receiver job repeats a step in its next round: %s", error
            )

    # -- the end ---------------------------------------------------------------------------------------------------

    def _stop(self, status: JobStatus | None) -> TrackerReport:
        """Stop the receivers: each gets the order with its next heartbeat, drains and ends."""
        reason = status.stop_reason if status is not None and status.stop_requested else "the job's process stops"
        if status is None or not status.stop_requested:
            self._tolerantly(lambda: self._ledger.jobs.request_stop(self._stream.name, reason or ""))
        logger.info("the receiver job of %s stops: %s", self._stream.name, reason)
        until = self._clock.monotonic() + self._stop_seconds
        while not all([receiver.reap() for receiver in self._receivers]):
            if self._clock.monotonic() >= until:
                for receiver in self._receivers:
                    receiver.cancel()
                return TrackerReport(TrackerEnd.FORCED, reason)
            self._renew()
            self._clock.wait(threading.Event(), TICK_SECONDS)
        self._sign.delete()
        return TrackerReport(TrackerEnd.STOPPED, reason)


def write_stop_request(folder: LogStorage, reason: str, *, requested_ms: int) -> None:
    """Request that the job of the stream with this folder stops, if its ledger does not answer.

    Usually the ledger orders a job to stop. A job whose ledger is lost could store nothing more, and would run on.
    """
    folder.write_atomically(STOP_REQUEST_PATH, json.dumps({"requested_ms": requested_ms, "reason": reason}).encode())


def find_stop_request(folder: LogStorage, *, since_ms: int) -> str | None:
    """Return the reason of a request made after ``since_ms``; None if there is none, or the folder cannot be read.

    A request is never deleted: a job whose ledger has answered since then ignores it.
    """
    try:
        if not folder.exists(STOP_REQUEST_PATH):
            return None
        request = json.loads(folder.read(STOP_REQUEST_PATH))
        return str(request["reason"]) if int(request["requested_ms"]) > since_ms else None
    except (HeadraceError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the stop request %s/%s cannot be read: %s", folder.url, STOP_REQUEST_PATH, error)
        return None
