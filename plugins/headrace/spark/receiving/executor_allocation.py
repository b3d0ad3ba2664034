"""Scales a stream's executors by how long its batches take, as Spark's manager of the same name does for streaming."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from headrace.errors import HeadraceError
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import AttemptState, BatchState, EventKind
from headrace.ledger.tables import JobLease
from headrace.receiver.placement import ExecutorPolicy, least_executors
from headrace.receiver.rates import ran_at_once
from headrace.spark.receiving.executors import (
    live_executor_ids,
    release_executor,
    request_total_executors,
    task_slots,
)
from headrace.stream.model import milliseconds
from headrace.stream.settings import ExecutorAllocation
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from headrace.spark.receiving.receiver_application import ReceiverApplication
    from headrace.spark.receiving.receiver_launcher import SparkReceiverLauncher

logger = logging.getLogger(__name__)

# Batches are read from the ledger at once: those that fit into a scaling interval, and some that were late.
_LATE_BATCHES = 20
_MAX_BATCHES = 1_000
# How soon batches use the task slots of new executors, and no longer count on those of lost ones.
_SLOTS_SECONDS = 5.0


class ExecutorAllocationManager:
    """Scales the executors of one stream's application from `__enter__` to `__exit__`, in a thread of its own.

    `headrace.receiver.placement` decides. This class has the inputs and the effects: processing times from the ledger,
    executors from Spark, executors with receivers from the launcher.

    A cluster manager that does not answer holds up this thread only. Failures are logged; the next scaling interval
    tries again. As Spark does, it starts with the executors that the application has.

    It also keeps the task slots in the attributes of ``job_lease``: by them a batch decides in how many tasks it reads.
    """

    def __init__(
        self,
        context: StreamContext,
        settings: ExecutorAllocation,
        application: ReceiverApplication,
        launcher: SparkReceiverLauncher,
        job_lease: JobLease,
    ) -> None:
        stream = context.stream
        self._stream = stream
        self._ledger = context.ledger
        self._clock = context.clock
        self._settings = settings
        self._spark_context = application.spark.sparkContext
        self._recorded_slots = application.task_slots
        self._lease = job_lease
        self._launcher = launcher
        self._policy = ExecutorPolicy(settings, stream.batch_interval_ms)
        fit = milliseconds(settings.scaling_interval) // stream.batch_interval_ms
        self._slots = 1 if stream.is_ordered else stream.limits.max_concurrent_batches
        self._limit = min(fit + _LATE_BATCHES + self._slots, _MAX_BATCHES)
        self._seen: set[tuple[int, int | None]] | None = None
        self._requested: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-executor-allocation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined: a call of the cluster manager may take minutes.
        self._stop.set()

    def _run(self) -> None:
        logger.info("executors of %s are allocated by %s", self._stream.name, self._settings.model_dump_json())
        seconds, next_scaling = self._policy.scaling_interval_seconds, self._clock.monotonic()
        while True:
            if self._clock.monotonic() >= next_scaling:
                next_scaling = self._clock.monotonic() + seconds
                _try(self.scale, "executors are not scaled now")
            _try(self.record_slots, "the task slots are not recorded now")
            wait_seconds = min(_SLOTS_SECONDS, max(0.0, next_scaling - self._clock.monotonic()))
            if self._clock.wait(self._stop, wait_seconds):
                return

    def record_slots(self) -> None:
        """Record the number of task slots, if it has changed.

        Raises:
            LeaseLostError: another job has begun.
            LedgerUnavailableError: the ledger does not answer.
        """
        slots = task_slots(self._spark_context)
        if slots != self._recorded_slots:
            attributes = {"task_slots": slots, "batch_slots": max(1, slots - self._stream.receivers)}
            self._ledger.jobs.update(self._lease, attributes=attributes)
            self._recorded_slots = slots

    def scale(self) -> None:
        """Scale by the batches that completed since the last call. The first call only notes which have completed.

        Raises:
            LedgerUnavailableError: the ledger does not answer.
        """
        self._policy.add(self._processing_ms())
        ratio = self._policy.end_interval()
        if ratio is None:
            return
        new = self._policy.new_executors(ratio)
        logger.debug("batches of %s take %.3f of their interval", self._stream.name, ratio)
        if new:
            self._request(ratio, new)
        elif self._policy.may_release(ratio):
            self._release(ratio)

    def _processing_ms(self) -> list[int]:
        """Processing times of the batches that have completed since the last call.

        A batch that took over other batch times has that many intervals. Batches that run at one time share executors.
        Batches in applications of their own do not count.
        """
        name, earlier = self._stream.name, self._seen
        completed = self._ledger.batches.page(name, self._limit, [BatchState.COMPLETED])
        running = self._ledger.batches.page(name, self._slots, [BatchState.RUNNING])
        times = []
        for batch in completed:
            if earlier is None or (batch.batch_time_ms, batch.completed_at_ms) in earlier:
                continue
            if batch.started_at_ms is None or batch.completed_at_ms is None or not self._ran_here(batch):
                continue
            at_once = min(self._slots, ran_at_once(batch, [*completed, *running]))
            times.append((batch.completed_at_ms - batch.started_at_ms) // (at_once * (1 + len(batch.absorbed))))
        self._seen = {(batch.batch_time_ms, batch.completed_at_ms) for batch in completed}
        return times

    def _ran_here(self, batch: BatchRow) -> bool:
        attempts = self._ledger.attempts.of_batch(self._stream.name, batch.batch_time_ms)
        done = [attempt for attempt in attempts if attempt.state is AttemptState.COMPLETED and not attempt.target]
        return all(attempt.way == "connect" for attempt in done)

    def _request(self, ratio: float, new: int) -> None:
        live = live_executor_ids(self._spark_context)
        total = self._policy.total(len(live), new, self._least(live))
        if not request_total_executors(self._spark_context, total):
            logger.warning("the cluster manager did not accept a request for %d executors", total)
            return
        # Beyond the maximum, or while the cluster is full, each interval repeats the request.
        if total != self._requested and total > len(live):
            logger.info("batches take %.2f of their interval: %d executors requested", ratio, total)
            payload = {"ratio": round(ratio, 3), "executors": total, "live": len(live)}
            self._ledger.events.append(self._stream.name, EventKind.EXECUTORS_REQUESTED, payload)
        self._requested = total

    def _release(self, ratio: float) -> None:
        with self._launcher.without_starts():
            busy = self._launcher.executors_of_receivers()
            if busy is None:
                logger.info("no executor is released: it is not known yet where each receiver runs")
                return
            live = live_executor_ids(self._spark_context)
            executor = self._policy.executor_to_release(live, busy, self._least(live))
            if executor is None:
                return
            # The release lowers the number that is requested by one. What was requested and not granted must go, or
            # the cluster would start an executor in place of the released one.
            left = len(live) - 1
            accepted = request_total_executors(self._spark_context, len(live))
            if not accepted or not release_executor(self._spark_context, executor):
                logger.warning("the cluster manager did not release executor %s", executor)
                return
        self._requested = left
        logger.info("batches take %.2f of their interval: executor %s released, %d left", ratio, executor, left)
        payload = {"ratio": round(ratio, 3), "executor": executor, "left": left}
        self._ledger.events.append(self._stream.name, EventKind.EXECUTOR_RELEASED, payload)

    def _least(self, live: Sequence[str]) -> int:
        slots_per_executor = task_slots(self._spark_context) // max(1, len(live))
        return least_executors(self._settings, self._stream.receivers, slots_per_executor)


def _try(step: Callable[[], object], otherwise: str) -> None:
    try:
        step()
    except HeadraceError as error:
        logger.warning("%s: %s", otherwise, error)
    except Exception:
        logger.exception("%s", otherwise)
