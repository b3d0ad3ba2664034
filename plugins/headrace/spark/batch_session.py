"""Opens the Spark session of a batch: in the receiver job's application over Spark Connect, or in its own."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger import JobState
from headrace.spark.packaging import connections_conf, send_code, send_connections
from headrace.spark.sessions import (
    attempt_session_id,
    attempt_tag,
    check_versions,
    classic_session,
    connect_session,
    end_session,
    given_conf,
    token_of_job,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import Attempt, AttemptRow
    from headrace.ledger.tables import JobRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


# How long Spark may take to start, including the allocation of executors.
START_SECONDS = 120.0


class ApplicationMissingError(HeadraceError):
    """There is no receiver application in which the batch can run."""


def open_connect_session(context: StreamContext, attempt: Attempt) -> SparkSession:
    """Open a session in the stream's receiver application, after ending earlier attempts' operations there.

    Raises ApplicationMissingError, VersionMismatchError, SecretKeyMissingError, ConnectUrlError, ConnectRefusedError.
    """
    job = await_job(context.ledger, context.name)
    check_versions(job.versions)
    url = str(job.attributes["connect_url"])
    token = token_of_job(job)
    end_earlier_attempts(context.ledger, attempt, url, token)
    spark = connect_session(url, token, session_id=attempt_session_id(attempt))
    time_zone = context.stream.spark.conf.get("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.session.timeZone", time_zone)
    return spark


def await_job(ledger: Ledger, stream_name: str, *, seconds: float = START_SECONDS) -> JobRow:
    """Like `running_job`, but first waits up to ``seconds`` for a job that is starting."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job = ledger.jobs.current(stream_name)
        if job is None or job.state is not JobState.STARTING or not job.alive(ledger.now_ms()):
            break
        time.sleep(0.5)
    return running_job(ledger, stream_name)


def running_job(ledger: Ledger, stream_name: str) -> JobRow:
    """The receiver job whose application can run batches; raises ApplicationMissingError, which gives the reason."""
    job = ledger.jobs.current(stream_name)
    if job is None or not job.alive(ledger.now_ms()):
        state = (
            "was never started"
            if job is None
            else f"is {job.state.value}, last heard of at {time_text(job.heartbeat_ms)}"
        )
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} {state}, so there is no application to run the batch in.",
            remedy=f"Start it (`headrace streams start {stream_name}`, or its receiver DAG), or run the batch with way "
            "'submit'.",
        )
    if not job.attributes.get("connect_url"):
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} (epoch {job.epoch}, {job.state.value}) has no Spark Connect "
            "server.",
            remedy="Wait until it has started. With spark.run_batches='submit' it has none: use way 'submit'.",
        )
    host = job.attributes.get("connect_host")
    if host not in (None, socket.gethostname()):
        raise ApplicationMissingError(
            f"The receiver job of stream {stream_name!r} runs on {host}. Its Spark Connect server can only be reached "
            "on that machine.",
            remedy="Run the batch there (a queue of its Airflow worker), or with way 'submit'.",
        )
    return job


def end_earlier_attempts(ledger: Ledger, attempt: Attempt, url: str, token: str) -> list[str]:
    """Interrupt the Spark operations of the earlier attempts that this one replaces. Returns the operations' ids.

    Attempts at other outputs of the batch, and replays, run concurrently and are not interrupted.
    """
    interrupted = []
    for earlier in ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms):
        if earlier.way == "connect" and replaces(attempt, earlier):
            interrupted += end_session(url, token, attempt_session_id(earlier), attempt_tag(earlier))
    return interrupted


def replaces(attempt: Attempt, earlier: AttemptRow) -> bool:
    """Whether the attempt repeats at least one output of the earlier attempt at the same batch."""
    return (
        earlier.number < attempt.number
        and earlier.target == attempt.target
        and not set(earlier.outputs).isdisjoint(attempt.outputs)
    )


def open_own_session(stream: Stream, attempt: Attempt) -> SparkSession:
    """Open the session of an application that runs only this batch."""
    name = f"headrace {stream.name} batch {time_text(attempt.batch_time_ms)}" + (
        f" {attempt.target}" if attempt.target else ""
    )
    master = given_conf().get("spark.master") or stream.spark.master_url(0)
    spark = classic_session(name, master=master, conf={**stream.spark.conf, **connections_conf(master)})
    send_code(spark.sparkContext, stream)
    send_connections(spark.sparkContext)
    return spark
