"""The Spark application of a receiver job, or of the jobs of several streams: what fits into it, and who is in it."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.connections import ConnectionNotFoundError, resolve
from headrace.errors import HeadraceError
from headrace.spark.attempts.batch_server import link_batch_server, start_batch_server, unlink_batch_server
from headrace.spark.attempts.warm_up import warm_up_connect
from headrace.spark.job_token import (
    token_from_environment,
)
from headrace.spark.receiving.executors import task_slots
from headrace.spark.receiving.receiver_application import (
    ReceiverApplication,
    check_task_slots,
    start_application,
)
from headrace.spark.receiving.receiver_launcher import SparkReceiverLauncher
from headrace.spark.sessions import is_local_master
from headrace.spark.termination import (
    jvm_gone,
)
from headrace.spark.versions import current_versions, version_differences
from headrace.stream import Stream

logger = logging.getLogger(__name__)


class StreamDoesNotFitError(HeadraceError):
    """The stream cannot run in the shared job's application, which was started otherwise."""


class JobApplication:
    """A started application, with a launcher for each stream whose receivers run in it. Safe across threads.

    ``first`` is the definition of the stream with whose settings it was started.
    """

    def __init__(
        self, application: ReceiverApplication, first: Stream, batch_server: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._application = application
        self._first = first
        self._batch_server = batch_server
        self._lock = threading.Lock()
        self._receivers: dict[str, int] = {}
        self._launchers: dict[str, SparkReceiverLauncher] = {}

    @classmethod
    def start(cls, first: Stream, epoch: int) -> JobApplication:
        """Start Spark by the settings of ``first``, and what batches need in it.

        ``epoch`` is that of the lease of the application's process; the token for batches is derived from it. Raises
        what `start_application` raises, and SecretKeyMissingError.
        """
        token = None
        if first.spark.run_batches == "connect":
            token = token_from_environment(first.application, epoch)
        started = time.monotonic()
        application = start_application(first, token=token)
        logger.info("Spark application ready after %.1f s: %s", time.monotonic() - started, application.attributes())
        if token is None:
            return cls(application, first)
        opened = cls(application, first, start_batch_server(first.ledger, first.application))
        slots = opened._slots_for_batches(application.batch_slots)
        warm_up_connect(str(application.connect_url), token, slots, first)
        return opened

    def jvm_gone(self) -> Callable[[], bool]:
        """A function that returns whether its JVM has ended."""
        return jvm_gone(self._application.spark.sparkContext._gateway)

    def check(self, stream: Stream, versions: Mapping[str, str]) -> None:
        """Check that the stream can run in the application, apart from task slots.

        ``versions`` are those of the task that requests it. Raises StreamDoesNotFitError.
        """
        problems = [*settings_differences(self._first, stream), *_missing_connections(stream)]
        if versions:
            problems += version_differences(current_versions(), versions)
        if problems:
            with self._lock:
                others = ", ".join(sorted(self._receivers)) or "none"
            raise StreamDoesNotFitError(
                f"Stream {stream.name!r} cannot run in the shared job {stream.spark.job!r}, whose process was started "
                f"otherwise: {'; '.join(problems)}. Streams that run there: {others}.",
                remedy="Give the streams of a job the same spark settings. A process with the present settings, "
                "connections and versions starts when no stream runs in this one: stop its streams (`headrace streams "
                "stop`) and start them, or end it by SIGTERM. Or give the stream another spark.job.",
            )

    def join(self, stream: Stream) -> tuple[ReceiverApplication, SparkReceiverLauncher]:
        """Take the stream in. Returns the application, with the task slots that its batches have, and its launcher.

        Raises TaskSlotsError if its receivers would leave no slot for batches.
        """
        spark_context = self._application.spark.sparkContext
        slots = task_slots(spark_context)
        with self._lock:
            occupied = sum(self._receivers.values()) + stream.receivers
            check_task_slots(slots, occupied)
            self._receivers[stream.name] = stream.receivers
            launcher = SparkReceiverLauncher(spark_context, stream, lambda: self._launchers_beside(stream.name))
            self._launchers[stream.name] = launcher
        if stream.application != stream.name:
            link_batch_server(stream.ledger, stream.name, stream.application)
        batch_slots = self._slots_for_batches(slots - occupied)
        return dataclasses.replace(self._application, task_slots=slots, batch_slots=batch_slots), launcher

    def leave(self, stream: Stream) -> None:
        """Give the stream's task slots to others."""
        with self._lock:
            self._receivers.pop(stream.name, None)
            self._launchers.pop(stream.name, None)
        unlink_batch_server(stream.ledger, stream.name)

    def stop(self) -> None:
        """End the batch server and Spark."""
        if self._batch_server is not None:
            self._batch_server.terminate()
        try:
            self._application.spark.stop()
        except Exception:
            logger.exception("Spark could not be stopped")

    def _slots_for_batches(self, free: int) -> int:
        if self._first.spark.job is not None and is_local_master(self._application.master):
            # The other slots are for receivers of further streams.
            return min(free, os.cpu_count() or 1)
        return free

    def _launchers_beside(self, stream_name: str) -> list[SparkReceiverLauncher]:
        with self._lock:
            return [launcher for name, launcher in self._launchers.items() if name != stream_name]


def settings_differences(first: Stream, stream: Stream) -> Iterator[str]:
    """Yield each field of the Spark settings in which ``stream`` differs from the stream that the job began with.

    A file of ``py_files`` may be in another folder, if its name and its content are the same: a git bundle of Airflow
    has a folder for each commit.
    """
    ours, theirs = first.spark.model_dump(mode="json"), stream.spark.model_dump(mode="json")
    for name, value in ours.items():
        if value != theirs[name] and not (name == "py_files" and _same_files(value, theirs[name])):
            yield f"spark.{name} is {_text(theirs[name])}, and {_text(value)} there"


def _same_files(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(map(_is_same_file, map(Path, ours), map(Path, theirs)))


def _is_same_file(ours: Path, theirs: Path) -> bool:
    if ours == theirs:
        return True
    try:
        return ours.name == theirs.name and ours.read_bytes() == theirs.read_bytes()
    except OSError:
        # A folder, a URL, or a file that is not on this host.
        return False


def _text(value: object) -> str:
    return "none" if value in (None, [], {}) else str(value)


def _missing_connections(stream: Stream) -> Iterator[str]:
    for conn_id in stream.connection_ids:
        try:
            resolve(conn_id)
        except ConnectionNotFoundError:
            yield f"the process does not have the connection {conn_id}"
