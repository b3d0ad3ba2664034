"""One attempt at a batch, in its process: the stream and claim it runs with, its Spark session, and its reports.

All steps of the attempt (``attempt``) share this object.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.spark.attempts.shared_jobs import JobInterruptedError
from headrace.spark.connect_sessions import attempt_tag, fail_fast
from headrace.spark.outputs.writer import WARNING
from headrace.spark.records.transforms import BatchContext
from headrace.spark.sessions import cancel_tag, is_connect, name_jobs, parallelism
from headrace.stream import STATE_STEP

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt
    from headrace.spark.attempts.shared_jobs import BatchBlocks, BlockTask, SharedSparkJobs
    from headrace.stream import Stream, Window
    from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


class BatchAttempt:
    """An attempt that has begun in the ledger.

    Args:
        context: the stream, with the definition that the attempt began with; of a replay, the replay's definition.
        claim: the attempt's token, from ``ledger.attempts.begin``.
        open_session: opens a Spark session, classic or Connect. It is called once, when a step first needs Spark.
        parameters: the value of ``batch.parameters`` for transforms; by default the stream's own.
        partitions: the approximate number of tasks that read an input; by default the session's parallelism.
        out: where console outputs print, by default stdout.
        report: receives a line of text at each step.
        pool: the pool of Spark's scheduler that its jobs run in; by default the stream's own. Jobs of one pool do not
            wait for the tasks of another: a large batch of one stream does not delay the others of a shared job.
        shared: the Spark jobs that this attempt shares with others; by default its jobs are its own.
    """

    def __init__(
        self,
        context: StreamContext,
        claim: Attempt,
        open_session: Callable[[], SparkSession],
        *,
        parameters: Mapping[str, Any] | None = None,
        partitions: int | None = None,
        out: IO[str] | None = None,
        report: Callable[[str], None] | None = None,
        pool: str | None = None,
        shared: SharedSparkJobs | None = None,
    ) -> None:
        self.context = context
        self.claim = claim
        self.parameters = context.stream.parameters if parameters is None else parameters
        self.partitions = partitions
        self.out = out or sys.stdout
        self.warning: str | None = None
        self._open_session = open_session
        self._report = report or (lambda _: None)
        self._spark: SparkSession | None = None
        self._tag = attempt_tag(claim)
        self._shared = shared
        self._step: str | None = None
        self._pool = pool or f"batches of {claim.stream}"

    @property
    def stream(self) -> Stream:
        """The definition that the attempt began with."""
        return self.context.stream

    @property
    def ledger(self) -> Ledger:
        """The stream's ledger."""
        return self.context.ledger

    @property
    def batch_time_ms(self) -> int:
        """The batch's time."""
        return self.claim.batch_time_ms

    @property
    def spark(self) -> SparkSession:
        """The session, opened at the first use."""
        if self._spark is None:
            self._spark = self._open_session()
            self._name_jobs(self._spark)
        return self._spark

    @property
    def shares_jobs(self) -> bool:
        """Whether `run_blocks` shares the jobs of other attempts."""
        return self._shared is not None

    def report(self, line: str) -> None:
        """Report a line of text. The last warning is kept in ``warning``, for the ledger."""
        if line.startswith(WARNING):
            self.warning = line.removeprefix(WARNING)
        self._report(line)

    def batch_context(self, window: Window | None) -> BatchContext:
        """The batch's properties for the user's functions; ``window`` is the output's, if it has one."""
        return BatchContext.of(
            self.stream.name,
            self.batch_time_ms,
            self.stream.batch_interval_ms,
            self.claim.number,
            parameters=self.parameters,
            window_ms=None if window is None else window.length_ms,
            target=self.claim.target,
        )

    def name_jobs(self, step: str) -> None:
        """Name the Spark jobs that this thread starts from now on by ``step``, once there is a session."""
        self._step = step
        if self._spark is not None:
            self._name_jobs(self._spark)

    def _name_jobs(self, spark: SparkSession) -> None:
        if self._step is not None:
            tags = (self._tag, f"{self._tag}/{self._step}")
            name_jobs(spark, self.description(self._step), group=tags[1], pool=self._pool, tags=tags)

    def run_blocks(self, task: BlockTask, blocks: BatchBlocks, schema: str) -> pa.Table:
        """Let Spark's tasks do this with the records of the blocks. Returns its results; ``schema`` is theirs, as DDL.

        Raises BatchTaskFailedError, or what Spark raises.
        """
        if self._shared is not None:
            try:
                return self._shared.run(self._tag, task, blocks)
            except JobInterruptedError as error:
                logger.debug("batch %s runs a job of its own: %s", time_text(self.batch_time_ms), error)
        return blocks.run(self.spark, self.partitions or parallelism(self.spark), task, schema)

    def description(self, step: str) -> str:
        """The description of the Spark jobs of a step, for Spark's user interface."""
        claim = self.claim
        replay = f", replay {claim.target}" if claim.target else ""
        output = "state" if step == STATE_STEP else f"output {step}"
        return f"{self.stream.name}: batch {time_text(claim.batch_time_ms)}, {output}{replay}, attempt {claim.number}"

    def cancel_jobs(self) -> None:
        """Cancel the attempt's running jobs, and no others but those that it shares. Call it last in a session of its
        own; any thread may call it."""
        if self._shared is not None:
            self._shared.interrupt(self._tag)
        spark = self._spark
        if spark is None:
            return
        if self._shared is None and is_connect(spark):
            fail_fast(spark)
        cancel_tag(spark, self._tag)
