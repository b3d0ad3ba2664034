"""Launches receivers as Spark tasks: each is one Spark job with one task, as in Spark Streaming."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.blocks import ReceiverId
from headrace.errors import HeadraceError
from headrace.ledger.states import ReceiverState
from headrace.receiver.placement import Executor, Location, Placement, ReceiverPlacement
from headrace.receiver.supervisor import ReceiverReport, ReceiverTask, run_receiver
from headrace.receiver.tracked_receiver import NoPlaceError
from headrace.secrets import log_to
from headrace.spark.attempts.failures import first_cause, task_cause
from headrace.spark.receiving.executors import (
    DRIVER,
    executor_of_group,
    executors_of,
    first_failure_of_group,
    placed,
    task_slots,
)
from headrace.spark.records.transforms import add_py_files
from headrace.spark.termination import ProcessWatch, parent_gone
from headrace.stream import Stream

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)

POOL = "receivers"
# The time between two queries for the executor of a receiver that has not begun: each takes Spark about 20 ms.
_ASK_SECONDS = 2.0
# The time between two queries for the live executors, by which the loss of a receiver's executor is noticed.
_LIVE_SECONDS = 1.0
# How long the start of a receiver waits for the release of an executor. The tracker must not be held up for longer.
_RELEASE_SECONDS = 1.0


class TaskRetriedError(HeadraceError):
    """Spark retried a receiver's task. Only the tracker decides about restarts, so the task ended at once."""


class NoFreeSlotError(NoPlaceError):
    """Executors were lost, and another receiver would take the last task slot: batches would wait forever."""


class ExecutorReleaseError(NoPlaceError):
    """An executor is being released, and a receiver could start on it."""


class SparkReceiverHandle:
    """A receiver's Spark job (``headrace.receiver.tracked_receiver.ReceiverHandle``)."""

    def __init__(
        self,
        spark_context: SparkContext,
        task: ReceiverTask,
        group: str,
        locations: Sequence[Location],
        live: Callable[[], Collection[Executor]],
        *,
        anywhere: bool = False,
    ) -> None:
        """``live`` returns the live executors; none while they are not known. ``anywhere``: accept the receiver where
        Spark has started it, also outside of its ``locations``."""
        self._spark_context = spark_context
        self._live = live
        self._anywhere = anywhere
        self._is_given_up = False
        self.is_refused = False
        self._task = task
        self._group = group
        self.locations = locations
        self._executor: Executor | None = None
        self._next_question = time.monotonic() + _ASK_SECONDS
        self._error: str | None = None
        # pyspark pins a JVM thread to each Python thread, so job group and pool apply to this receiver only.
        self._thread = threading.Thread(target=self._run, name=f"headrace-{task.receiver_id}", daemon=True)
        self._thread.start()

    @property
    def receiver_id(self) -> ReceiverId:
        return self._task.receiver_id

    def running_on(self) -> Executor | None:
        """The executor that runs it; None while it is not known."""
        if self._executor is None and time.monotonic() >= self._next_question:
            self._next_question = time.monotonic() + _ASK_SECONDS
            self._executor = executor_of_group(self._spark_context, self._group)
        return self._executor

    def done(self) -> bool:
        """Whether its job has ended, or is given up: it started outside of its locations, or its executor is lost. The
        job of a lost executor is not waited for: Spark repeats its task, which takes many seconds and always fails."""
        if not self._is_given_up and self._thread.is_alive() and (reason := self._reason_to_give_up()) is not None:
            self._is_given_up = True
            self._error = reason
            self.cancel()
        return self._is_given_up or not self._thread.is_alive()

    def _reason_to_give_up(self) -> str | None:
        executor = self._executor
        if executor is None or executor.executor_id == DRIVER:
            return None
        if not self._anywhere and self.locations and not {executor, executor.host}.intersection(self.locations):
            self.is_refused = True
            planned = " or ".join(map(str, self.locations))
            return f"it started on {executor} instead of {planned}; it is placed again"
        live = self._live()
        return f"{executor} was lost" if live and executor not in live else None

    def error(self) -> str | None:
        return self._error

    def cancel(self) -> None:
        if self._thread.is_alive():
            self._spark_context.cancelJobGroup(self._group)

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the job to end. Returns whether it has ended."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            receiver = self._task.receiver_id
            # As in Spark Streaming, with the stream and the input.
            name = f"Streaming job running receiver {receiver.index} ({receiver.stream}, input {receiver.input_id})"
            self._spark_context.setJobGroup(self._group, name, interruptOnCancel=True)
            self._spark_context.setLocalProperty("spark.scheduler.pool", POOL)
            (report,) = placed(self._spark_context, self._task, self.locations).map(run_receiver_task).collect()
        except Exception as error:
            if not self._is_given_up:
                self._error = self._first_failure() or first_cause(error)
        else:
            self._error = None if report.state is ReceiverState.STOPPED else report.error

    def _first_failure(self) -> str | None:
        with contextlib.suppress(Exception):
            text = first_failure_of_group(self._spark_context, self._group)
            return None if text is None else task_cause(text)
        return None


class SparkReceiverLauncher:
    """Starts the stream's receivers in a Spark application, each on the executor that ``ReceiverPlacement`` chooses.

    It is a ``headrace.receiver.tracked_receiver.ReceiverLauncher``.

    One task slot is reserved for batches, also after executors were lost. A receiver waits if no other slot is free.

    A receiver that Spark started elsewhere, because no slot was free there for ``spark.locality.wait``, is refused, as
    Spark's tracker does, and placed again by the present load. Unlike Spark's it is then accepted wherever it starts: a
    receiver in the wrong place is better than none.

    ``others`` returns the launchers of other streams in the application.
    """

    def __init__(
        self,
        spark_context: SparkContext,
        stream: Stream,
        others: Callable[[], Sequence[SparkReceiverLauncher]] = tuple,
    ) -> None:
        self._spark_context = spark_context
        self._others = others
        self._placement = ReceiverPlacement(stream)
        self._launched = 0
        self._starting = threading.Lock()
        self._live: list[Executor] = []
        self._next_listing = 0.0
        self._handles: list[SparkReceiverHandle] = []
        self._refused: set[ReceiverId] = set()

    def start(self, task: ReceiverTask) -> SparkReceiverHandle:
        """Start the receiver of ``task``.

        Raises:
            NoFreeSlotError: the receiver would take the last task slot.
            ExecutorReleaseError: the release of an executor takes longer than a second.
        """
        if not self._starting.acquire(timeout=_RELEASE_SECONDS):
            raise ExecutorReleaseError(
                "The cluster manager has not released an executor yet, and the receiver could start on it.",
                remedy="The receiver starts when the cluster manager has answered.",
            )
        try:
            return self._start(task)
        finally:
            self._starting.release()

    def _start(self, task: ReceiverTask) -> SparkReceiverHandle:
        self._refused |= {known.receiver_id for known in self._handles if known.done() and known.is_refused}
        self._handles = [known for known in self._handles if not known.done()]
        slots, running = task_slots(self._spark_context), self._all_running()
        if slots < running + 2:
            raise NoFreeSlotError(
                f"The Spark application has only {slots} task slot(s): {running} run receivers, and one is reserved "
                "for batches.",
                remedy="The receiver starts when there are enough executors again; or stop and start the stream.",
            )
        self._launched += 1
        group = f"headrace/receiver/{task.receiver_id}/{task.scheduled.job.epoch}/{self._launched}"
        was_refused = task.receiver_id in self._refused
        locations = self._locations(task.receiver_id, ignore_plan=was_refused)
        handle = SparkReceiverHandle(
            self._spark_context, task, group, locations, self._live_executors, anywhere=was_refused
        )
        self._refused.discard(task.receiver_id)
        self._handles.append(handle)
        return handle

    def running(self) -> int:
        """The number of its receivers that have not ended."""
        return sum(not known.done() for known in self._handles)

    def placements(self) -> dict[ReceiverId, Placement]:
        """Where each of its receivers runs, or is to run."""
        return {
            handle.receiver_id: Placement(tuple(handle.locations), handle.running_on())
            for handle in list(self._handles)
            if not handle.done()
        }

    def _all_running(self) -> int:
        """The number of receivers of all streams that have not ended."""
        return self.running() + sum(launcher.running() for launcher in self._others())

    @contextmanager
    def without_starts(self) -> Iterator[None]:
        """Start no receiver during a ``with`` block, so that `executors_of_receivers` stays true."""
        with self._starting:
            yield

    def executors_of_receivers(self) -> set[str] | None:
        """The ids of the executors that run its receivers; None while one of them is not known."""
        executors = [known.running_on() for known in self._handles if not known.done()]
        ids = {executor.executor_id for executor in executors if executor is not None}
        return None if None in executors else ids

    def crowding(self) -> str | None:
        """The reason why batches cannot run, if the receivers hold every task slot after a loss of executors."""
        running = self._all_running()
        try:
            slots = task_slots(self._spark_context) if running else 1
        except Exception:
            logger.exception("the number of task slots cannot be determined")
            return None
        if slots > running:
            return None
        return (
            f"The Spark application has {slots} task slot(s) left, and {running} receiver(s) hold them all: no batch "
            "can run. Executors were lost and not replaced; check the cluster."
        )

    def _locations(self, receiver: ReceiverId, *, ignore_plan: bool) -> tuple[Location, ...]:
        try:
            executors = executors_of(self._spark_context)
            others = self._others() if executors else ()
            of_other_streams = {
                receiver: place for launcher in others for receiver, place in launcher.placements().items()
            }
            candidates = self._placement.candidates(
                receiver, executors, self._running, of_other_streams, ignore_plan=ignore_plan
            )
        except Exception:
            # Without a placement the receiver starts on any executor.
            logger.exception("the executors cannot be listed, so receiver %s may run on any of them", receiver)
            return ()
        logger.info("receiver %s is to run on %s", receiver, ", ".join(map(str, candidates)) or "any executor")
        return candidates

    def _live_executors(self) -> list[Executor]:
        """The live executors, as of a second ago at most; none while they cannot be listed."""
        if time.monotonic() >= self._next_listing:
            self._next_listing = time.monotonic() + _LIVE_SECONDS
            try:
                self._live = executors_of(self._spark_context)
            except Exception:
                logger.exception("the executors cannot be listed")
                self._live = []
        return self._live

    def _running(self) -> dict[ReceiverId, Executor | None]:
        return {known.receiver_id: known.running_on() for known in self._handles}

    def cancel_all(self, seconds: float) -> bool:
        """Cancel all running receivers and wait for them, for ``seconds`` in total. Returns whether all have ended."""
        until = time.monotonic() + seconds
        for handle in self._handles:
            handle.cancel()
        return all([handle.join(until - time.monotonic()) for handle in self._handles])


def run_receiver_task(task: ReceiverTask) -> ReceiverReport:
    """Run a receiver within its Spark task. Raises TaskRetriedError in a retry of the task."""
    from pyspark import TaskContext

    task_context = TaskContext.get()
    if task_context is not None and task_context.attemptNumber() > 0:
        raise TaskRetriedError(f"Spark retried the task of receiver {task.receiver_id}.")
    log_to()
    add_py_files(Stream.model_validate_json(task.stream_json), may_be_missing=True)
    # The task waits for Kafka, not for Spark, so it would not notice that its daemon and JVM are gone.
    watch = ProcessWatch(parent_gone()).start()
    try:
        return run_receiver(task)
    finally:
        watch.dismiss()
