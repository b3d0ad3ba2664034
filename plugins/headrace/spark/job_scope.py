"""Names one attempt's Spark jobs in Spark's user interface, and cancels them without affecting other jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.spark.sessions import attempt_tag, fail_fast, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger.models import Attempt

POOL = "batches"


class JobScope:
    """Marks the jobs that the calling thread starts. Classic sessions show job group and description in Spark's user
    interface; a Connect server sets these two itself and shows the tags."""

    def __init__(self, spark: SparkSession, attempt: Attempt) -> None:
        self._spark = spark
        replay = f" replay {attempt.target}" if attempt.target else ""
        self._name = f"{attempt.stream} batch {attempt.batch_time_ms}{replay} attempt {attempt.number}"
        self._tag = attempt_tag(attempt)

    @property
    def tag(self) -> str:
        """The tag of every job of the attempt."""
        return self._tag

    def enter(self, part: str) -> None:
        """Name this thread's jobs by ``part``: an output's id, or "state"."""
        group = f"{self._tag}/{part}"
        if is_connect(self._spark):
            self._spark.clearTags()
            self._spark.addTag(self._tag)
            self._spark.addTag(group)
            return
        # A writer looks up its data source in its thread's active session, and a new thread has none.
        jvm: Any = self._spark._jvm
        self._spark._get_j_spark_session_class(jvm).setActiveSession(self._spark._jsparkSession)
        context = self._spark.sparkContext
        context.setJobGroup(group, f"{self._name}: {part}", interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", POOL)
        context.addJobTag(self._tag)

    def cancel(self) -> None:
        """Cancel the attempt's running jobs. Call it last in a session; it may be called from any thread."""
        if is_connect(self._spark):
            fail_fast(self._spark)
            self._spark.interruptTag(self._tag)
        else:
            self._spark.sparkContext.cancelJobsWithTag(self._tag)
