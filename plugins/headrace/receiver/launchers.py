"""Starts receivers in threads or processes, without Spark. Spark's launcher is in ``headrace.spark``."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Protocol

from headrace.ledger.states import ReceiverState
from headrace.receiver.receiver_task import ReceiverTask, run_receiver


class ReceiverHandle(Protocol):
    """A receiver that was started. The tracker's loop calls it, so no method waits."""

    def done(self) -> bool:
        """Whether its job has ended, with or without an error."""
        ...

    def error(self) -> str | None:
        """Why it ended; None while it runs, and after a requested stop."""
        ...

    def cancel(self) -> None:
        """End it by force. Safe at any moment: what is not stored is read again."""
        ...


class ReceiverLauncher(Protocol):
    """Starts receivers somewhere. ``start`` must not wait for the receiver; raising counts as an end with error."""

    def start(self, task: ReceiverTask) -> ReceiverHandle: ...

    def crowding(self) -> str | None:
        """Why batches cannot run beside the running receivers; None if they can."""
        ...


class ThreadHandle:
    """A receiver in a thread of this process."""

    def __init__(self, task: ReceiverTask) -> None:
        self._task = task
        self._stop = threading.Event()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace-{task.receiver_id}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            report = run_receiver(self._task, self._stop)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        else:
            self._error = None if report.state is ReceiverState.STOPPED else report.error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> str | None:
        return self._error

    def cancel(self) -> None:
        self._stop.set()


class ThreadLauncher:
    """For tests and small streams: threads share one interpreter, so several receivers are no faster than one."""

    def start(self, task: ReceiverTask) -> ReceiverHandle:
        return ThreadHandle(task)

    def crowding(self) -> str | None:
        return None


class ProcessHandle:
    """A receiver in its own process."""

    def __init__(self, task: ReceiverTask) -> None:
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_run_and_exit, args=(task,), daemon=True, name=str(task.receiver_id))
        self.process.start()

    def done(self) -> bool:
        return not self.process.is_alive()

    def error(self) -> str | None:
        code = self.process.exitcode
        return None if code in (None, 0) else f"its process ended with {code}"

    def cancel(self) -> None:
        self.process.kill()


class ProcessLauncher:
    """Starts each receiver in its own process, on this machine."""

    def start(self, task: ReceiverTask) -> ReceiverHandle:
        return ProcessHandle(task)

    def crowding(self) -> str | None:
        return None


def _run_and_exit(task: ReceiverTask) -> None:
    report = run_receiver(task)
    raise SystemExit(0 if report.state is ReceiverState.STOPPED else 1)
