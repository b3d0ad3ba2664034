"""Finds the processes to hit, from the process table alone, independently of headrace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
from tests.hammer.kinds import Target

from headrace.devstack.state import living_processes, processes_of_stack

Group = list[psutil.Process]
"""Processes that are hit together, the one that counts first."""


class TargetProcesses:
    """The processes of the stream ``stream_name`` in the stack ``stack_id``, whose log is below ``storage``."""

    def __init__(self, stack_id: str, stream_name: str, storage: Path) -> None:
        self._stack_id = stack_id
        self._stream_name = stream_name
        self._storage = str(storage)
        self._finders: Mapping[Target, Callable[[], list[Group]]] = {
            Target.RECEIVER_TASK: lambda: [[process] for process in self.writers()],
            Target.RECEIVER_DRIVER: lambda: [[p] for p in self._running("receiver.py") if not _is_java(p)],
            Target.RECEIVER_JVM: lambda: [[p] for p in self._running("receiver.py") if _is_java(p)],
            Target.RECEIVER_JOB: self._jobs,
            Target.BATCH: lambda: [[p] for p in self._running("micro_batch.py", "headrace batch") if not _is_java(p)],
            Target.EXECUTOR: self._executors,
        }

    def find(self, target: Target) -> list[Group]:
        """The groups that could be hit just now, the oldest first."""
        groups = self._finders[target]()
        return sorted(groups, key=lambda group: (_started(group[0]), group[0].pid))

    def writers(self) -> list[psutil.Process]:
        """Python workers that have a file of the log open for writing: the receivers."""
        return [process for process in self._all() if "pyspark.daemon" in _command(process) and self._writes(process)]

    def jobs(self) -> int:
        """How many receiver jobs of the stream there are."""
        return len(self._jobs())

    def _jobs(self) -> list[Group]:
        """Each with all of its session, its JVM first."""
        found = []
        for jvm in self._running("receiver.py"):
            if _is_java(jvm):
                rest = [process for process in living_processes() if _session(process) == _session(jvm)]
                found.append([jvm, *(process for process in rest if process.pid != jvm.pid)])
        return found

    def _executors(self) -> list[Group]:
        name = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
        found = []
        for process in self._all():
            if name in _command(process):
                with contextlib.suppress(psutil.Error):
                    found.append([process, *process.children(recursive=True)])
        return found

    def _running(self, application: str, title: str | None = None) -> Iterator[psutil.Process]:
        """The processes of this program for the stream, and those with this title."""
        for process in self._all():
            command = _command(process)
            runs = self._stream_name in command and any(Path(word).name == application for word in command)
            if runs or (title is not None and " ".join(command).startswith(f"{title} {self._stream_name} ")):
                yield process

    def _writes(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            for file in process.open_files():
                if file.path.startswith(f"{self._storage}{os.sep}") and file.mode != "r":
                    return True
        return False

    def _all(self) -> list[psutil.Process]:
        return processes_of_stack(self._stack_id)


def _is_java(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "java")
    return False


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _started(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.create_time())
    return 0.0


def _session(process: psutil.Process) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid)
    return None
