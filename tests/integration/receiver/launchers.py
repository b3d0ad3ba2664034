"""Launchers of receivers without Spark: in a thread of the test's process, or each in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading

from headrace.ledger import ReceiverState
from headrace.receiver.supervisor import ReceiverTask, run_receiver

# Forked from a process that has imported what a receiver needs: each would take two seconds of CPU to import it. That
# process has no thread and no client, as Spark's daemon of Python workers.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["headrace.receiver.supervisor"])


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

    def running_on(self) -> None:
        """No executor of Spark runs it."""

    def error(self) -> str | None:
        return self._error

    def cancel(self) -> None:
        self._stop.set()


class ThreadLauncher:
    def start(self, task: ReceiverTask) -> ThreadHandle:
        return ThreadHandle(task)

    def crowding(self) -> None:
        """Threads hold no task slots."""


class ProcessHandle:
    """A receiver in its own process, which a test can kill."""

    def __init__(self, task: ReceiverTask) -> None:
        self.process = _PROCESSES.Process(target=_run_and_exit, args=(task,), daemon=True, name=str(task.receiver_id))
        self.process.start()

    def done(self) -> bool:
        return not self.process.is_alive()

    def running_on(self) -> None:
        """No executor of Spark runs it."""

    def error(self) -> str | None:
        code = self.process.exitcode
        return None if code in (None, 0) else f"its process ended with {code}"

    def cancel(self) -> None:
        self.process.kill()


class ProcessLauncher:
    def __init__(self) -> None:
        self.handles: list[ProcessHandle] = []

    def start(self, task: ReceiverTask) -> ProcessHandle:
        self.handles.append(ProcessHandle(task))
        return self.handles[-1]

    def crowding(self) -> None:
        """Processes hold no task slots."""


def _run_and_exit(task: ReceiverTask) -> None:
    report = run_receiver(task)
    raise SystemExit(0 if report.state is ReceiverState.STOPPED else 1)
