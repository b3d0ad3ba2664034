"""One attempt at a batch, from its manifest to its results in the ledger.

The work is done by a thread of its own, while the calling thread waits for it and renews the attempt's lease: a lease
is renewed only as long as someone waits for the work, and whoever is fenced, or told to end, cancels the work's Spark
jobs, and no others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

from headrace.batching.manifest import Manifest
from headrace.errors import HeadraceError
from headrace.ledger.errors import AttemptFencedError, LedgerUnavailableError
from headrace.spark.batch_outputs import BatchOutputs, Counts
from headrace.spark.failures import first_cause
from headrace.spark.job_scope import JobScope

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger import Ledger
    from headrace.ledger.rows import Attempt
    from headrace.stream import Stream

# An attempt whose process is gone holds the batch for this long.
LEASE_MS = 30_000

# How long cancelled Spark jobs are waited for.
_CANCEL_SECONDS = 15.0
_ERROR_CHARACTERS = 2_000


class BatchFailedError(HeadraceError):
    """The batch's work failed; the text is the innermost reason, the cause has Spark's own account."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What an attempt did. ``outputs`` holds each output's counts, ``seconds`` is what the work took."""

    stream: str
    batch_time_ms: int
    attempt: int
    records: int
    blocks: int
    seconds: float
    outputs: dict[str, Counts] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def run_micro_batch(
    spark: SparkSession | Callable[[], SparkSession],
    stream: Stream,
    ledger: Ledger,
    attempt: Attempt,
    *,
    out: IO[str] | None = None,
    tell: Callable[[str], None] | None = None,
    partitions: int | None = None,
) -> BatchResult:
    """Run a begun attempt (``ledger.batches.begin_attempt``) at an allocated batch and complete it.

    Args:
        spark: a session, classic or Connect, or what makes one when the batch needs it.
        out: where console outputs print, by default stdout.
        tell: gets a line at each step, for people.
        partitions: about how many tasks read an input; by default the session's parallelism.

    Raises:
        BatchFailedError: the transform, an output or Spark failed. The attempt has failed, the batch can be run again.
        AttemptFencedError: a newer attempt took the batch. This one's Spark jobs are cancelled.
    """
    run = _Run(spark if callable(spark) else lambda: spark, stream, ledger, attempt, tell or (lambda _: None))
    return run.to_the_end(out or sys.stdout, partitions)


class _Run:
    def __init__(
        self,
        session: Callable[[], SparkSession],
        stream: Stream,
        ledger: Ledger,
        attempt: Attempt,
        tell: Callable[[str], None],
    ) -> None:
        self._session = session
        self._stream = stream
        self._ledger = ledger
        self._attempt = attempt
        self._tell = tell
        self._scope: JobScope | None = None
        self._ended = threading.Event()
        self._cancelled = False
        self._results: dict[str, Counts] = {}
        self._failure: BaseException | None = None

    def to_the_end(self, out: IO[str], partitions: int | None) -> BatchResult:
        started = time.monotonic()
        manifest = self._load_manifest()
        blocks = sum(len(listed) for listed in manifest.inputs.values())
        self._tell(f"{manifest.records:,} records in {blocks:,} blocks")
        work = BatchOutputs(
            stream=self._stream,
            manifest=manifest,
            attempt=self._attempt.number,
            session=self._session,
            scope=self._new_scope,
            out=out,
            tell=self._tell,
            partitions=partitions,
        )
        worker = threading.Thread(target=self._work, args=(work,), name="headrace-batch", daemon=True)
        worker.start()
        try:
            self._wait()
        except BaseException as error:
            self._cancel()
            self._fail(error)
            raise
        if self._failure is not None:
            self._end_if_fenced(self._failure)
            self._fail(self._failure)
            if isinstance(self._failure, HeadraceError):
                raise self._failure
            raise BatchFailedError(f"The batch failed: {first_cause(self._failure)}") from self._failure
        self._ledger.batches.complete_attempt(self._attempt)
        seconds = round(time.monotonic() - started, 3)
        self._tell(f"completed in {seconds} s")
        return BatchResult(
            self._stream.name,
            self._attempt.batch_time_ms,
            self._attempt.number,
            manifest.records,
            blocks,
            seconds,
            self._results,
        )

    def _load_manifest(self) -> Manifest:
        batch = self._ledger.batches.get(self._attempt.stream, self._attempt.batch_time_ms)
        try:
            return Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        except Exception as error:
            self._fail(error)
            raise

    def _work(self, work: BatchOutputs) -> None:
        try:
            self._results = work.write(self._record)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()

    def _record(self, output: str, counts: Counts) -> None:
        self._ledger.batches.record_output(self._attempt, output, counts)

    def _new_scope(self, spark: SparkSession) -> JobScope:
        self._scope = JobScope(spark, self._stream.name, self._attempt.batch_time_ms, self._attempt.number)
        return self._scope

    def _wait(self) -> None:
        """Wait for the work; every third of the lease, renew it. Raises AttemptFencedError."""
        period = self._attempt.lease_ms / 3000
        held_until = time.monotonic() + self._attempt.lease_ms / 1000
        while not self._ended.wait(period):
            try:
                self._ledger.batches.renew_attempt(self._attempt)
                held_until = time.monotonic() + self._attempt.lease_ms / 1000
            except LedgerUnavailableError:
                # The lease holds until it is out; then someone else may have begun.
                if time.monotonic() > held_until:
                    raise

    def _cancel(self) -> None:
        self._cancelled = True
        deadline = time.monotonic() + _CANCEL_SECONDS
        # A job may be just about to start when the others are cancelled.
        while not self._ended.is_set() and time.monotonic() < deadline:
            if self._scope is not None:
                with contextlib.suppress(Exception):
                    self._scope.cancel()
            self._ended.wait(0.5)

    def _end_if_fenced(self, failure: BaseException) -> None:
        """A later attempt ends this one's work in Spark, which then fails before it is known to be fenced."""
        try:
            self._ledger.batches.renew_attempt(self._attempt)
        except AttemptFencedError as fenced:
            raise fenced from failure
        except LedgerUnavailableError:
            # The failure itself is all that can be told.
            return

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, AttemptFencedError):
            return
        with contextlib.suppress(HeadraceError):
            self._ledger.batches.fail_attempt(self._attempt, first_cause(error)[:_ERROR_CHARACTERS])
