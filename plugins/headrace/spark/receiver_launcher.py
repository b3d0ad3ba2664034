"""Receivers as Spark tasks: one Spark job of one task each, as Spark Streaming launched them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.ledger.states import ReceiverState
from headrace.receiving.receiver_task import ReceiverTask, run_receiver
from headrace.receiving.supervisor import ReceiverReport
from headrace.spark.coupling import ProcessWatch, parent_gone
from headrace.spark.failures import first_cause

if TYPE_CHECKING:
    from pyspark import SparkContext

POOL = "receivers"


class TaskRetriedError(HeadraceError):
    """Spark started a receiver's task again by itself; the tracker decides about that, so the task ended at once."""


class SparkReceiverHandle:
    """A receiver's Spark job (``headrace.receiving.launchers.ReceiverHandle``)."""

    def __init__(self, context: SparkContext, task: ReceiverTask, group: str) -> None:
        self._context = context
        self._task = task
        self._group = group
        self._error: str | None = None
        # pyspark pins a JVM thread to each of its own: group and pool are this receiver's alone.
        self._thread = threading.Thread(target=self._run, name=f"headrace-{task.receiver_id}", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> str | None:
        return self._error

    def cancel(self) -> None:
        if not self.done():
            self._context.cancelJobGroup(self._group)

    def join(self, seconds: float) -> bool:
        """Wait until the job has ended; whether it has."""
        self._thread.join(max(0.0, seconds))
        return self.done()

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"receiver {self._task.receiver_id}", interruptOnCancel=True)
            self._context.setLocalProperty("spark.scheduler.pool", POOL)
            (report,) = self._context.parallelize([self._task], 1).map(run_receiver_task).collect()
        except Exception as error:
            self._error = first_cause(error)
        else:
            self._error = None if report.state is ReceiverState.STOPPED else report.error


class SparkReceiverLauncher:
    """Starts receivers in a Spark application (``headrace.receiving.launchers.ReceiverLauncher``)."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._launched = 0
        self._handles: list[SparkReceiverHandle] = []

    def start(self, task: ReceiverTask) -> SparkReceiverHandle:
        self._launched += 1
        group = f"headrace/receiver/{task.receiver_id}/{task.job_lease.epoch}/{self._launched}"
        handle = SparkReceiverHandle(self._context, task, group)
        self._handles = [known for known in self._handles if not known.done()]
        self._handles.append(handle)
        return handle

    def cancel_all(self, seconds: float) -> bool:
        """Cancel every receiver that still runs and wait for them, all together for ``seconds``; whether all ended."""
        until = time.monotonic() + seconds
        for handle in self._handles:
            handle.cancel()
        return all([handle.join(until - time.monotonic()) for handle in self._handles])


def run_receiver_task(task: ReceiverTask) -> ReceiverReport:
    """What the Spark task runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        raise TaskRetriedError(f"Spark tried the task of receiver {task.receiver_id} again by itself.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The task waits on Kafka, not on Spark: it would not notice that its daemon and JVM are gone.
    watch = ProcessWatch(parent_gone()).start()
    try:
        return run_receiver(task)
    finally:
        watch.dismiss()
