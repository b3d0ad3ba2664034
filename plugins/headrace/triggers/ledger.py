"""Triggers that poll the ledger until they fire, and how often operators, sensors and triggers poll it.

The waits of a receiver job's task, of a run that begins, and of its batch.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.configuration import conf
from airflow.sdk.exceptions import AirflowFailException
from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.hooks.ledger import LedgerHook, in_thread
from headrace.runs.batch_run import NothingToRun, of_schedule, takes_over
from headrace.runs.readiness import InputsNotReceivedError, blocks_ready, find_beginning
from headrace.runs.receiver_job import ATTACHED, JobWatch, is_of_another_run, receiving

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.runs.batch_run import BatchRun
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


class PollIntervalError(HeadraceError):
    """``[headrace] poll_interval`` is not a positive number of seconds."""


def poll_seconds(given: float | None = None, *, otherwise: float = 1.0) -> float:
    """Seconds between two polls of the ledger: ``given``, else ``[headrace] poll_interval``, else ``otherwise``.

    Raises:
        PollIntervalError: the setting is not a positive number.
    """
    if given is not None:
        return given
    setting = conf.get("headrace", "poll_interval", fallback=None)
    if not setting:
        return otherwise
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PollIntervalError(
            f"[headrace] poll_interval is {setting!r}, which is not a positive number of seconds.",
            remedy="Set AIRFLOW__HEADRACE__POLL_INTERVAL to seconds, 1.0 for instance, or leave it out.",
        )
    return seconds


def in_triggerer(deferrable: bool | None) -> bool:
    """Whether to wait deferred: ``deferrable``, else ``[operators] default_deferrable``."""
    if deferrable is not None:
        return deferrable
    return conf.getboolean("operators", "default_deferrable", fallback=False)


FIRST_POLL_SECONDS = 1.0
"""How long a task polls in place before it defers, in seconds: a deferral and resume costs 2.2 s."""
_FIRST_POLL_EVERY = 0.1
RETRY_SECONDS = 30.0
"""How often a watcher retries a ledger that has another version or does not exist yet, in seconds."""
# The longest pause after a ledger did not answer, in seconds. The pause starts at the poll interval and doubles. When
# the ledger answers again, a batch that waits for its blocks goes on within this time.
_LONGEST_PAUSE = 5.0


class LedgerTrigger(BaseTrigger):
    """Polls the ledger from a thread, and retries while it is unavailable: a database restart fails no task.

    Subclasses keep their arguments in ``parameters`` (`serialize` stores them; no secrets) and implement `poll`.
    ``run`` starts from its beginning in every new triggerer, so `poll` must depend on the ledger alone.

    :param poll_interval: seconds between two polls; by default ``[headrace] poll_interval``.
    """

    POLL_SECONDS: ClassVar[float] = 1.0
    """The poll interval in seconds if neither the argument nor the configuration gives one."""
    CREATE: ClassVar[bool] = True
    """Whether to create the ledger in an empty database."""

    def __init__(self, *, ledger: str, stream: str, poll_interval: float | None = None, **parameters: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.stream = stream
        self.poll_interval = poll_seconds(poll_interval, otherwise=self.POLL_SECONDS)
        self.parameters = parameters
        self._open: Ledger | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Airflow's form of the trigger: the class path and its arguments."""
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            "ledger": self.ledger,
            "stream": self.stream,
            "poll_interval": self.poll_interval,
            **self.parameters,
        }

    @abc.abstractmethod
    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        """Called in a thread at each poll. Returns the event's payload, or None to poll again."""

    def poll_before_deferring(self, ledger: Ledger) -> dict[str, Any] | None:
        """Call `poll` in this thread for ``FIRST_POLL_SECONDS``, at least once. Returns its payload, or None."""
        deadline = time.monotonic() + FIRST_POLL_SECONDS
        while (payload := self.poll(ledger)) is None and time.monotonic() <= deadline:
            time.sleep(_FIRST_POLL_EVERY)
        return payload

    def poll_until_it_fires(self, ledger: Ledger) -> dict[str, Any]:
        """Call `poll` in this thread, for a task that does not defer. Returns its payload."""
        while (payload := self.poll(ledger)) is None:
            time.sleep(self.poll_interval)
        return payload

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until there is an event, and yield it."""
        try:
            yield TriggerEvent(await self._polled())  # type: ignore[no-untyped-call]
        finally:
            await self._close()

    async def _polled(self) -> dict[str, Any]:
        """Call `poll` until it returns a payload, and return it. The ledger stays open.

        After a failure the ledger is opened anew. SQLite's file may have been deleted: if all tasks waited for it, none
        would rebuild it. In the empty ledger `poll` does not find the stream, and the task that goes on then recovers
        it. Or the connection has another password now.
        """
        from headrace.ledger.errors import LedgerUnavailableError

        pause = self.poll_interval
        while True:
            what = "does not answer" if self._open is not None else "cannot be opened"
            try:
                if self._open is None:
                    self._open = await LedgerHook(self.ledger).aget_conn(create=self.CREATE)
                payload = await in_thread(self.ledger, self.poll, self._open)
            except LedgerUnavailableError as error:
                self.log.warning("The ledger %s, trying again in %.0f s: %s", what, pause, error)
                await self._close()
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if payload is not None:
                return payload
            pause = self.poll_interval
            await asyncio.sleep(pause)

    async def _close(self) -> None:
        if self._open is not None:
            closing, self._open = self._open, None
            await in_thread(self.ledger, closing.close)


class LedgerWatcher(LedgerTrigger, BaseEventTrigger):
    """Polls the ledger without end, and fires whenever `poll` returns a payload. The watcher of an asset: it runs as
    long as the DAG scheduled by that asset exists and is not paused."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event for each payload, without end. Retries while the ledger cannot be read."""
        await self.recall()
        try:
            while True:
                try:
                    payload = await self._polled()
                except Exception as error:
                    # Airflow would restart an ended watcher at once, over and over. The ledger's connection may be
                    # missing, for example.
                    self.log.warning(
                        "The ledger cannot be read, trying again in %.0f s: %s: %s",
                        RETRY_SECONDS, type(error).__name__, error,
                    )  # fmt: skip
                    await self._close()
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                await self.remember()
                yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
        finally:
            await self._close()

    async def recall(self) -> None:
        """Called first, in a new triggerer too."""

    async def remember(self) -> None:
        """Called before each event."""


# How often the task's log repeats why a batch waits, in seconds. A batch may wait for hours, with five polls a second.
# The warning interval is shorter because that wait is bounded.
_REPORT_SECONDS = 60.0
_WARN_SECONDS = 15.0


class BlocksReadyTrigger(LedgerTrigger):
    """Fires once a batch time has all its blocks, or the bounded wait for its inputs is over.

    :param waiting_since_ms: when the batch's task began to wait, by the ledger's clock; a new triggerer keeps it.
    """

    # Receivers seal several times a second; a batch should not wait for the poll.
    POLL_SECONDS = 0.2

    def __init__(
        self,
        *,
        ledger: str,
        stream: str,
        batch_time_ms: int,
        grace_ms: int,
        waiting_since_ms: int = 0,
        poll_interval: float | None = None,
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            batch_time_ms=batch_time_ms,
            grace_ms=grace_ms,
            waiting_since_ms=waiting_since_ms,
        )
        self._report_at = 0.0
        self._reported_missing = False

    @classmethod
    def of(
        cls,
        stream: Stream,
        batch_time_ms: int,
        *,
        waiting_since_ms: int = 0,
        grace: timedelta | None = None,
        poll_interval: float | None = None,
    ) -> BlocksReadyTrigger:
        """The trigger for a batch time of a stream; ``grace`` is by default the stream's ``limits.seal_grace``."""
        return cls(
            ledger=stream.ledger,
            stream=stream.name,
            batch_time_ms=batch_time_ms,
            grace_ms=(stream.limits.seal_grace if grace is None else grace) // timedelta(milliseconds=1),
            waiting_since_ms=waiting_since_ms,
            poll_interval=poll_interval,
        )

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        readiness = blocks_ready(ledger, self.stream, **self.parameters)
        if readiness.ready or readiness.failed:
            return {"reason": readiness.reason, "complete": readiness.complete, "failed": readiness.failed}
        if time.monotonic() >= self._report_at or readiness.inputs_missing != self._reported_missing:
            self._reported_missing = readiness.inputs_missing
            self._report_at = time.monotonic() + (_WARN_SECONDS if readiness.inputs_missing else _REPORT_SECONDS)
            level = logging.WARNING if readiness.inputs_missing else logging.INFO
            self.log.log(level, "Not ready: %s.", readiness.reason)
        return None


def report_readiness(event: dict[str, Any], stream: Stream, log: Any) -> None:
    """Log the result of the trigger's `poll`.

    Raises:
        AirflowFailException: the inputs of a batch by arrival were not received in time. The batch has no records, so
            a retry has nothing to do: later batches take the records that come later.
        InputsNotReceivedError: the same for a batch by timestamp, whose records may still come.
    """
    reason = event["reason"]
    if event.get("failed"):
        what = f"{reason[0].upper()}{reason[1:]}."
        if stream.batch_by == "timestamp":
            raise InputsNotReceivedError(what)
        raise AirflowFailException(what)
    if event.get("complete", True):
        log.info("Done: %s.", reason)
    else:
        log.warning("The batch does not wait any longer for its blocks: %s.", reason)


# How long a requested run waits for its batch's turn.
_REQUESTED_WAIT_MS = 1_800_000
MAX_WAITED = timedelta(minutes=5)
"""How long a run waits for the stream's first receiver, before it fails."""


class NoReceiverError(HeadraceError):
    """The stream has never received."""


def check_began(event: dict[str, Any], stream: Stream) -> None:
    """Fail the run if the wait timed out.

    Raises:
        NoReceiverError: no receiver has begun.
    """
    if not event["began"]:
        raise NoReceiverError(
            f"No receiver has begun within {MAX_WAITED}: {event['reason']}.",
            remedy=f"Unpause the DAG {stream.name}_receiver, and read the log of its task.",
        )


class FirstReceiverTrigger(LedgerTrigger):
    """Fires once an interval has ended since the stream's first receiver began, or when the ledger's clock reaches
    ``until_ms``. The payload has ``began`` and ``reason``."""

    def __init__(
        self, *, ledger: str, stream: str, interval_ms: int, until_ms: int, poll_interval: float | None = None
    ) -> None:
        super().__init__(
            ledger=ledger, stream=stream, poll_interval=poll_interval, interval_ms=interval_ms, until_ms=until_ms
        )
        self._reported = ""

    @classmethod
    def awaited(cls, context: Context, stream_context: StreamContext) -> FirstReceiverTrigger | None:
        """The trigger that a scheduled run has to wait for before its batch is determined, if the stream has not begun
        to receive; else None. Requested runs do not wait, nor do batches by timestamp, whose records may be older."""
        stream, ledger = stream_context.stream, stream_context.ledger
        if not of_schedule(context) or stream.batch_by != "arrival":
            return None
        until_ms = ledger.now_ms() + MAX_WAITED // timedelta(milliseconds=1)
        trigger = cls(ledger=stream.ledger, stream=stream.name, interval_ms=stream.batch_interval_ms, until_ms=until_ms)
        return None if trigger.poll(ledger) is not None else trigger

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        now_ms = ledger.now_ms()
        beginning = find_beginning(ledger, self.stream)
        if beginning.at_ms is None:
            if now_ms >= self.parameters["until_ms"]:
                return {"began": False, "reason": beginning.reason}
            if beginning.reason != self._reported:
                self._reported = beginning.reason
                self.log.info("Waiting for the stream's first receiver: %s.", beginning.reason)
            return None
        interval_ms = self.parameters["interval_ms"]
        if now_ms // interval_ms * interval_ms < beginning.at_ms:
            return None
        return {"began": True, "reason": "the stream's receivers have begun"}


class TurnTrigger(LedgerTrigger):
    """Fires when no earlier batch of an ordered stream is left, or when the ledger's clock reaches ``until_ms``. The
    payload has ``turn``, whether it is the batch's turn, and ``reason``.

    :param unclaimed: whether earlier batch times without a batch count too. They do not if the run's own batch will
        take them over.
    """

    def __init__(
        self,
        *,
        ledger: str,
        stream: str,
        batch_time_ms: int,
        until_ms: int,
        unclaimed: bool,
        poll_interval: float | None = None,
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            batch_time_ms=batch_time_ms,
            until_ms=until_ms,
            unclaimed=unclaimed,
        )
        self._reported = ""

    @classmethod
    def awaited(cls, run: BatchRun) -> TurnTrigger | None:
        """The trigger that the run has to wait for once its blocks are ready, before its batch is allocated; None if it
        is its turn. First allocates the batch times that no run has processed and that come before the run's own.

        A run that others follow waits for ``limits.retry_for``, a requested one for half an hour.
        """
        batch = run.find_batch()
        if not run.stream.is_ordered or (batch is not None and batch.steps is not None):
            return None
        unclaimed = not takes_over(run.context, run.stream)
        if unclaimed:
            run.allocate_missed()
        wait_ms = run.stream.retry_for_ms if run.is_automatic else _REQUESTED_WAIT_MS
        trigger = cls(
            ledger=run.stream.ledger,
            stream=run.stream.name,
            batch_time_ms=run.batch_time_ms,
            until_ms=run.ledger.now_ms() + wait_ms,
            unclaimed=unclaimed,
        )
        return None if trigger.poll_before_deferring(run.ledger) is not None else trigger

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.batch.next_attempt import awaited_turn

        unclaimed = self.parameters["unclaimed"]
        awaited = awaited_turn(ledger, self.stream, self.parameters["batch_time_ms"], unclaimed=unclaimed)
        if awaited is None:
            return {"turn": True, "reason": "no earlier batch is unfinished"}
        if ledger.now_ms() >= self.parameters["until_ms"]:
            return {"turn": False, "reason": awaited.reason}
        if awaited.reason != self._reported:
            self._reported = awaited.reason
            self.log.info("Waiting for the batch's turn: %s.", awaited.reason)
        return None


def check_turn(event: dict[str, Any], run: BatchRun) -> None:
    """End the run if its turn has not come in time.

    Raises:
        NothingToRun: other runs follow, and take the batch time over or allocate it.
        NotItsTurnError: the run was requested.
    """
    if event["turn"]:
        return
    name = run.stream.name
    remedy = (
        f"The DAG {name}_repair runs the earlier batch again. If that batch can never succeed, abandon it: "
        f"`headrace batches abandon {name} TIME --reason WHY` (with `--output ID` only one of its outputs)"
    )
    if run.is_automatic:
        raise NothingToRun(f"{event['reason']}. The next runs process this batch time. {remedy}")
    from headrace.ledger.errors import NotItsTurnError

    what = f"It is not the turn of batch {time_text(run.batch_time_ms)}: {event['reason']}."
    raise NotItsTurnError(what, busy=[], remedy=f"{remedy}.")


class ReceiverJobTrigger(LedgerTrigger):
    """Fires when the receiver job of one epoch is over: ``{"outcome": "stopped|failed|lost|superseded", "epoch": …}``.

    The trigger follows the job by its lease alone, so a new triggerer continues where the last one stopped. Changes
    (states, receivers' errors) are written to the task's log.
    """

    def __init__(self, *, ledger: str, stream: str, epoch: int, poll_interval: float | None = None) -> None:
        super().__init__(ledger=ledger, stream=stream, poll_interval=poll_interval, epoch=epoch)
        self._watch = JobWatch(stream, epoch, progress=self._report, warn=self._warn)

    def _report(self, text: str) -> None:
        self.log.info("%s", text)

    def _warn(self, text: str) -> None:
        self.log.warning("%s", text)

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        outcome = self._watch.poll(ledger)
        return None if outcome is None else {"outcome": outcome.value, "epoch": self._watch.epoch}

    async def on_kill(self) -> None:
        """Called when a person marks or clears the deferred task: ask the job to stop, so that it drains.

        Airflow also calls it in a triggerer that was cut off or blocked for so long that another one has taken its
        triggers over. Then the task is still deferred, and the job goes on. So does a job that a task of another run
        has attached to: the DAG was renamed, and a person deletes the old one.
        """
        stopping = asyncio.create_task(self._stop_unless_deferred())
        while not stopping.done():
            # Airflow cancels a trigger again, about each second, until it has ended. The ledger may take longer.
            with suppress(asyncio.CancelledError):
                await asyncio.wait([stopping])
        stopping.result()

    async def _stop_unless_deferred(self) -> None:
        if await self._is_deferred():
            self.log.info("The task is still deferred: another triggerer has taken it over. The job goes on.")
            return
        ledger = await LedgerHook(self.ledger).aget_conn()
        try:
            await in_thread(self.ledger, self._request_stop, ledger)
        finally:
            await in_thread(self.ledger, ledger.close)

    def _request_stop(self, ledger: Ledger) -> None:
        job = ledger.jobs.current(self.stream)
        if job is not None and self.task_instance is not None and is_of_another_run(job, self.task_instance):
            self.log.info("The receiver job goes on: %s has attached to it.", job.attributes[ATTACHED])
            return
        # Of a later job, a later task decides.
        ledger.jobs.request_stop(self.stream, "its Airflow task was ended by a person", epoch=self._watch.epoch)

    async def _is_deferred(self) -> bool:
        """Whether the trigger's task is deferred. False if Airflow does not answer: a stop loses nothing."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        instance = self.task_instance
        if instance is None:
            return False
        try:
            states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
                dag_id=instance.dag_id, task_ids=[instance.task_id], run_ids=[instance.run_id]
            )
        except Exception as error:
            self.log.warning("Airflow does not report the task's state: %s", error)
            return False
        return bool(states.get(instance.run_id, {}).get(instance.task_id) == "deferred")


class StreamWantedTrigger(LedgerTrigger):
    """Fires when the stream's desired state is running: ``headrace streams start`` after ``stop``."""

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.ledger.states import DesiredState

        if ledger.streams.get(self.stream).desired_state is DesiredState.RUNNING:
            return {"desired_state": DesiredState.RUNNING.value}
        return None


class ReceiversReceivingTrigger(LedgerTrigger):
    """Fires once all of the stream is received. Until then the task's log shows why it is not.

    The number of its receivers is that of the definition in the ledger at each poll. It does not create the ledger.
    """

    CREATE = False

    def __init__(
        self,
        *,
        ledger: str,
        stream: str,
        max_silence_ms: int,
        poll_interval: float | None = None,
    ) -> None:
        super().__init__(ledger=ledger, stream=stream, poll_interval=poll_interval, max_silence_ms=max_silence_ms)
        self._reported = ""
        self._warned = ""

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.ledger.errors import StreamNotFoundError
        from headrace.receiver.health import outdated_definition
        from headrace.stream import Stream

        try:
            receivers = Stream.from_json(ledger.streams.get(self.stream).definition).receivers
        except StreamNotFoundError as error:
            self._report(str(error))
            return None
        outdated = outdated_definition(ledger, self.stream)
        if outdated is not None and str(outdated) != self._warned:
            self._warned = str(outdated)
            self.log.warning("%s", self._warned)
        receiving_now = receiving(ledger, self.stream, receivers=receivers, **self.parameters)
        self._report(receiving_now.reason)
        return {"reason": receiving_now.reason} if receiving_now.ok else None

    def _report(self, reason: str) -> None:
        if reason != self._reported:
            self._reported = reason
            self.log.info("%s", reason)
