"""Receivers as Spark tasks: one Spark job of one task each, as Spark Streaming launched them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.blocks import ReceiverId
from headrace.errors import HeadraceError
from headrace.spark.coupling import ProcessWatch, parent_gone

if TYPE_CHECKING:
    from pyspark import SparkContext

POOL = "receivers"


class TaskRetriedError(HeadraceError):
    """Spark started a receiver's task again by itself; the tracker decides about that, so the task ended at once."""


class SparkReceiverHandle:
    """A launched receiver. ``alive`` until its Spark job has ended; ``result`` is then None, or what went wrong."""

    def __init__(self, context: SparkContext, receiver_id: ReceiverId, group: str, task: Callable[[], None]) -> None:
        from pyspark import InheritableThread

        self.receiver_id = receiver_id
        self._context = context
        self._group = group
        self._task = task
        self._result: BaseException | None = None
        # Pinned to a JVM thread of its own, so that group and pool are this receiver's alone.
        self._thread = InheritableThread(target=self._run, name=f"receiver-{receiver_id}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return bool(self._thread.is_alive())

    @property
    def result(self) -> BaseException | None:
        return self._result

    def cancel(self) -> None:
        """End the receiver's task without draining it (safe: what it had not stored is read from Kafka again)."""
        self._context.cancelJobGroup(self._group)

    def join(self, seconds: float) -> bool:
        """Wait until the job has ended; whether it has."""
        self._thread.join(seconds)
        return not self.alive

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, f"headrace receiver {self.receiver_id}", interruptOnCancel=True)
            self._context.setLocalProperty("spark.scheduler.pool", POOL)
            self._context.parallelize([self._task], 1).foreach(_run_task)
        except BaseException as error:  # noqa: BLE001 - the tracker decides what it means
            self._result = error


class SparkReceiverLauncher:
    """Starts receivers in a Spark application; ``task`` of a receiver is what runs on the executor, picklable."""

    def __init__(self, context: SparkContext, task: Callable[[ReceiverId], Callable[[], None]], *, epoch: int) -> None:
        self._context = context
        self._task = task
        self._epoch = epoch
        self._launched = 0
        self._lock = threading.Lock()
        self._handles: list[SparkReceiverHandle] = []

    def start(self, receiver_id: ReceiverId) -> SparkReceiverHandle:
        with self._lock:
            self._launched += 1
            group = f"headrace/receiver/{receiver_id}/{self._epoch}/{self._launched}"
            handle = SparkReceiverHandle(self._context, receiver_id, group, self._task(receiver_id))
            self._handles = [known for known in self._handles if known.alive]
            self._handles.append(handle)
            return handle

    def cancel_all(self, seconds: float) -> bool:
        """Cancel every receiver that still runs and wait for them together; whether all have ended."""
        with self._lock:
            handles = [handle for handle in self._handles if handle.alive]
        for handle in handles:
            handle.cancel()
        return all([handle.join(seconds) for handle in handles])


def _run_task(task: Callable[[], None]) -> None:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        raise TaskRetriedError("This is Spark's own retry of a receiver's task.")
    # The task waits on Kafka, not on Spark: it would not notice that its daemon and JVM are gone.
    watch = ProcessWatch(parent_gone()).start()
    try:
        task()
    except Exception:
        # Spark shows the driver a stack of its own; the executor's log shows the cause alone.
        traceback.print_exc()
        raise
    finally:
        watch.dismiss()


def first_cause(error: BaseException) -> str:
    """One line that says why a receiver's job failed: the Python error below Spark's Java stack, if it is there."""
    text = str(error)
    python_lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.strip().startswith("Traceback (most recent call last)"):
            inside, python_lines = True, []
        elif inside and line and not line[0].isspace():
            python_lines.append(line)
            inside = False
    if python_lines:
        return python_lines[-1]
    return text.splitlines()[0] if text else type(error).__name__
