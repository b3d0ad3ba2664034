"""`headrace streams list`, `show`, `start`, `stop`, `reopen` and `check`: streams with their states, receivers and
partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import (
    EXECUTOR_VARIABLE,
    AsJson,
    LedgerUrl,
    OptionalLedgerUrl,
    StreamName,
    defined,
    examples,
    opened,
)
from headrace.cli.output import echo, print_json, print_table
from headrace.clock import time_text, times_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.checks.connecting import Checked
    from headrace.ledger import Ledger
    from headrace.receiver.health import OutdatedDefinition
    from headrace.stream import Stream
    from headrace.views.streams import LastError, ReceiverJob, StreamDetail, StreamSummary


# Of more batch times only the first and the last one are named.
_TIMES_SHOWN = 5
# The values of a curve, and what only Airflow knows: which DAGs declare the stream, and what its user may do.
_DAGS = {"batch_dag_id", "receiver_dag_id", "replay_dag_ids", "other_batch_dag_ids"}
_NOT_IN_JSON = {"sparklines", "ledger", "may", *_DAGS}


@examples("streams list", "streams list --json", "streams list --ledger sqlite:////srv/orders/ledger.db")
def list_streams(*, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """List the streams with their states, lag, rate and delay, and say what to do about those that are not well."""
    from headrace.receiver.health import outdated_definition
    from headrace.views.streams import default_place, summaries

    with opened(ledger) as opened_ledger:
        # Without Airflow nothing is known of the DAGs.
        streams = summaries(
            opened_ledger, [(row, default_place(row.name, ledger)) for row in opened_ledger.streams.all()], {}
        )
        stale = {summary.name: outdated_definition(opened_ledger, summary.name) for summary in streams}
        if as_json:
            print_json([_json(opened_ledger, summary, stale[summary.name]) for summary in streams])
            return
    print_table(
        ("stream", "state", "lag", "lag s", "records/s", "last completed batch", "total delay", "oldest unfinished"),
        [
            (
                *(
                    summary.name,
                    _words(summary.state),
                    _lag(summary),
                    _rounded(summary.lag_seconds),
                    summary.input_rate,
                ),
                *(_last(summary), _total_delay(summary), _oldest(summary)),
            )
            for summary in streams
        ],
    )
    alike: dict[tuple[str, str, str | None], list[str]] = {}
    for summary in streams:
        if summary.state != "well":
            alike.setdefault((summary.state, summary.reason, summary.remedy), []).append(summary.name)
    for (state, reason, what_to_do), names in alike.items():
        # A ledger that is locked is the reason of all its streams.
        more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        remedy = "" if what_to_do is None else f" What to do: {what_to_do}"
        _print_line(f"{names[0]}{more} {_words(state)}: {reason}{remedy}")
    for summary in streams:
        if stale[summary.name] is not None:
            _print_line(f"{summary.name}: {stale[summary.name]}")


@examples("streams show orders")
def show_stream(name: StreamName, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Show one stream: its state and what to do, its receiver job, receivers and partitions."""
    from headrace.listeners.bus import ListenerStatus as JobListener
    from headrace.receiver.health import outdated_definition
    from headrace.views.streams import default_place, stream_detail

    with opened(ledger) as opened_ledger:
        detail = stream_detail(opened_ledger, name, default_place(name, ledger), {})
        stale = outdated_definition(opened_ledger, name)
        if as_json:
            print_json(_json(opened_ledger, detail, stale))
            return
    since = "" if detail.since_ms is None else f" since {time_text(detail.since_ms)}"
    _print_line(f"Stream {name} is {_words(detail.state)}{since}: {detail.reason}")
    if detail.remedy is not None:
        _print_line(f"What to do: {detail.remedy}")
    for reason in detail.also:
        _print_line(f"Also: {reason}")
    _print_line(_numbers(detail))
    _print_line(_job(detail.receiver_job))
    if stale is not None:
        _print_line(str(stale))
    for listener in (JobListener(**dict(fields)) for fields in detail.listeners):
        if not listener.well:
            _print_line(str(listener))
    _print_receivers(detail)
    _print_partitions(detail)


def _json(ledger: Ledger, summary: StreamSummary, stale: OutdatedDefinition | None) -> dict[str, Any]:
    job = ledger.jobs.current(summary.name)
    return {name: value for name, value in summary if name not in _NOT_IN_JSON} | {
        "unclaimed": len(ledger.blocks.unclaimed(summary.name)),
        "revision": ledger.streams.get(summary.name).revision,
        "job_revision": None if job is None else job.attributes.get("revision"),
        "unadopted": stale,
    }


def _words(state: str) -> str:
    return state.replace("_", " ")


def _print_line(text: str) -> None:
    """Print text of others, such as an error of several lines, as one line."""
    echo(" ".join(text.split()))


def _lag(summary: StreamSummary) -> str | None:
    """The number of records that are not yet in the log, as text; None if there is no figure."""
    if summary.lag is None:
        return "unknown" if summary.lag_unknown else None
    return f"at least {summary.lag:,}" if summary.lag_unknown else f"{summary.lag:,}"


def _last(summary: StreamSummary) -> str:
    last = summary.last_completed_batch
    return time_text(None if last is None else last.batch_time_ms)


def _total_delay(summary: StreamSummary) -> str | None:
    last = summary.last_completed_batch
    return None if last is None else _seconds(last.total_delay)


def _oldest(summary: StreamSummary) -> str | None:
    oldest = summary.oldest_unfinished
    return None if oldest is None else f"{time_text(oldest.batch_time_ms)}, {oldest.state}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"


def _numbers(summary: StreamSummary) -> str:
    """The stream's lag, rate and delays in sentences."""
    seconds = "" if summary.lag_seconds is None else f" ({summary.lag_seconds:.0f} s)"
    text = f"Lag: {_lag(summary) or 'unknown'} records{seconds}, received: {summary.input_rate:,} records/s."
    last = summary.last_completed_batch
    if last is not None:
        began, done = _seconds(last.scheduling_delay), _seconds(last.total_delay)
        text += f" The last completed batch is {_last(summary)}: it began {began} and was done {done} after its time."
    oldest = summary.oldest_unfinished
    if oldest is not None:
        text += f" Oldest unfinished batch: {_oldest(summary)}{f': {oldest.error}' if oldest.error else ''}."
    return text


def _job(job: ReceiverJob | None) -> str:
    if job is None:
        return "There is no receiver job yet."
    ended = "" if job.ended_at_ms is None else f", until {time_text(job.ended_at_ms)}"
    error = "" if job.error is None else f": {job.error}"
    log = "" if job.log_path is None else f"; its log on {job.host} is {job.log_path}"
    return f"Receiver job {job.state}, held by {job.holder} since {time_text(job.since_ms)}{ended}{error}{log}"


def _last_error(error: LastError) -> str:
    stack = " (--json has the stack)" if error.stack else ""
    return f"{time_text(error.at_ms)}: {error.text}{stack}"


def _print_receivers(detail: StreamDetail) -> None:
    print_table(
        (
            *("receiver", "state", "lag", "records/s", "host", "executor", "heartbeat", "sealed through", "restarts"),
            "late",
            "last error",
        ),
        [
            (
                *(receiver.id, receiver.state, receiver.lag, receiver.rate, receiver.host, receiver.executor),
                *(
                    time_text(receiver.heartbeat_at_ms),
                    time_text(receiver.sealed_through_ms),
                    receiver.restarts,
                    receiver.late_records,
                ),
                None if receiver.last_error is None else _last_error(receiver.last_error),
            )
            for receiver in detail.receivers
        ],
    )


def _print_partitions(detail: StreamDetail) -> None:
    by_timestamp = detail.definition.get("batch_by") == "timestamp"
    print_table(
        (
            *("input", "topic", "partition", "incarnation", "next offset", "lag", "receiver", "state"),
            *(("latest timestamp", "drained at") if by_timestamp else ()),
            "error",
        ),
        [
            (
                *(row.input, row.topic, row.partition, row.incarnation, row.next_offset),
                *(row.lag, row.receiver, row.state),
                *((time_text(row.watermark_ms), time_text(row.drained_ms)) if by_timestamp else ()),
                row.error,
            )
            for row in detail.partitions
        ],
    )


_NOT_STOPPED = 4
"""Exit code of `stop --wait` when the receiver job still runs at the deadline."""


@examples("streams start orders")
def start(name: StreamName, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Let a stopped stream run again: its waiting receiver DAG starts the receiver job."""
    with opened(ledger) as opened_ledger:
        opened_ledger.streams.set_desired_state(name, "running")
    if as_json:
        print_json({"stream": name, "desired_state": "running"})
    else:
        echo(f"Stream {name} is to run; its receiver DAG starts the receiver job.")


@examples("streams stop orders --wait 60", "streams stop orders --storage /srv/headrace --reason 'the ledger is lost'")
def stop(
    name: StreamName,
    *,
    ledger: OptionalLedgerUrl,
    storage: Annotated[
        str | None,
        typer.Option(help="Instead of --ledger, if the ledger is lost: the storage that the definition names."),
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason; it is kept with the job.")] = "headrace streams stop",
    wait: Annotated[float, typer.Option(help="Wait this many seconds for the end of the receiver job.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Stop a stream gracefully: its receivers store what they have read, then end. Batches continue.

    With --storage, for a lost ledger: the receiver job ends if its ledger does not answer, and stores nothing more.
    """
    if storage is not None:
        _stop_without_ledger(name, storage, reason, as_json=as_json)
        return
    if ledger is None:
        raise typer.BadParameter("give it; or, if the ledger is lost, give --storage", param_hint="--ledger")
    with opened(ledger) as opened_ledger:
        opened_ledger.streams.set_desired_state(name, "stopped")
        opened_ledger.jobs.request_stop(name, reason)
        deadline = time.monotonic() + wait
        while running := _runs(opened_ledger, name):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
    if as_json:
        print_json({"stream": name, "desired_state": "stopped", "running": running})
    else:
        echo(f"Stream {name} is asked to stop." if running else f"Stream {name} is stopped.")
    if running and wait:
        raise typer.Exit(_NOT_STOPPED)


@examples("streams reopen orders", "streams reopen orders --yes")
def reopen(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise only print what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let records have batch times of now again, after batches were allocated while the ledger's clock was ahead.

    These batches stay as they are, and are run as others. The records that wait for times after them get the next batch
    time, and so do new ones. Correct the clock first.
    """
    with opened(ledger) as opened_ledger:
        done = opened_ledger.clock_corrections.reopen(name, dry_run=not yes)
        now_ms = opened_ledger.now_ms()
    if as_json:
        print_json({"stream": name, "done": yes, "reopened": done})
    elif done is None:
        echo(f"No batch time of {name} is sealed ahead of the ledger's clock, {time_text(now_ms)}: nothing to open.")
    else:
        open_at, sealed = time_text(done.batch_time_ms), time_text(done.sealed_until_ms)
        echo(f"By the ledger's clock it is {time_text(now_ms)}, and {name} is sealed until {sealed}.")
        echo(f"{len(done.batches)} batches have times ahead of now, and keep them and their records:")
        echo(f"  {_ends(done.batches)}")
        if yes:
            echo(f"{done.taken.records:,} records that waited now have batch time {open_at}, and new ones follow them.")
        else:
            echo(f"Records that wait, and new ones, would get batch time {open_at}.")
            echo("Nothing is changed yet; --yes does it.")


def _ends(times: Sequence[int]) -> str:
    if len(times) <= _TIMES_SHOWN:
        return times_text(times)
    return f"{time_text(times[0])} to {time_text(times[-1])}"


def _stop_without_ledger(name: str, storage: str, reason: str, *, as_json: bool) -> None:
    from headrace.clock import SystemClock
    from headrace.receiver.tracker import write_stop_request
    from headrace.wal.storage import open_storage

    folder = open_storage(storage).below(name)
    if not folder.paths():
        raise typer.BadParameter(f"{folder.url} holds nothing of a stream", param_hint="--storage")
    write_stop_request(folder, reason, requested_ms=SystemClock().now_ms())
    if as_json:
        print_json({"stream": name, "requested_in": folder.url})
    else:
        echo(
            f"A receiver job of stream {name} whose ledger does not answer ends within a minute. One whose ledger "
            "answers goes on: stop that with --ledger."
        )


def _runs(ledger: Ledger, name: str) -> bool:
    from headrace.runs.receiver_job import newest_job

    job = newest_job(ledger, name)
    return job is not None and job.alive(ledger.now_ms())


@examples(
    "streams check pipelines.orders:stream",
    "streams check orders.json --connect",
    "streams check pipelines.orders:stream --connect --spark",
    "streams check pipelines.orders:stream --executor KubernetesExecutor",
)
def check(
    definition: Annotated[str, typer.Argument(help="A JSON file, or module:attribute of a Stream.")],
    *,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect",
            help="Also check that ledger, storage, Kafka, its topics and each output's server answer, rights, and that "
            "the indices take the columns.",
        ),
    ] = False,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark",
            help="With --connect: start Spark here and call the transforms without records, so that the columns which "
            "they make are known.",
        ),
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            envvar=EXECUTOR_VARIABLE,
            metavar="NAME",
            help="Airflow's executor for the stream's tasks, as in its setting [core] executor. Refuses what cannot "
            "work there. `airflow headrace` knows it from Airflow's configuration.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a stream's definition and the code that it names; prints the reason and exits with 1 if it cannot run.

    It cannot run if its log or ledger would be lost where Airflow runs its tasks (--executor, or a managed Airflow).
    With --connect, also checks its ledger, storage, Kafka topics and outputs, and names the principal that logs in to
    Kafka and the rights that it lacks. It shows what each index makes of the documents' fields, and fails if the index
    refuses them. Connections come from AIRFLOW_CONN_... variables.
    """
    from headrace.checks.task_places import check_place, task_place
    from headrace.kafka.client import check_client_settings
    from headrace.listeners.listener import check_listeners
    from headrace.receiver.receiver import check_receiver_classes
    from headrace.spark.records.transforms import add_py_files, check_transform
    from headrace.spark.versions import check_spark_packages
    from headrace.stream.stream import check_extensions

    if spark and not connect:
        raise typer.BadParameter(
            "it is for --connect: the columns are compared with those of an index", param_hint="--spark"
        )
    stream = defined(definition)
    check_spark_packages()
    check_place(stream, task_place(executor), lambda text: echo(f"Warning: {text}", err=True))
    for note in check_client_settings(stream):
        echo(note, err=True)
    add_py_files(stream)
    check_extensions(stream)
    check_transform(stream)
    check_receiver_classes(stream)
    check_listeners(stream)
    if connect:
        _check_connections(stream, spark=spark, as_json=as_json)
    elif as_json:
        typer.echo(stream.to_json())
    else:
        for line in _columns(stream):
            echo(line)
        echo(f"Stream {stream.name} can run.")


def _columns(stream: Stream) -> Iterator[str]:
    """The columns of decoded keys and values."""
    from headrace.stream.schema_decoders import SchemaNotKnownError

    for source in stream.inputs:
        read_by = source
        if stream.storage.is_local and any(decoder.is_framed for decoder in source.decoders.values()):
            # Not at the top: a check takes as long as its imports.
            from headrace.batch.readers import last_read_by

            read_by = last_read_by(stream, source)
        for field, decoder in read_by.decoders.items():
            if decoder.decodes is None:
                continue
            try:
                columns = decoder.column + (f"; beside it {decoder.beside}" if decoder.beside else "")
            except SchemaNotKnownError:
                columns = "columns of a schema registry, which --connect asks"
            yield f"Input {source.id}, {field.removesuffix('_decoder')}: {columns}"


def _check_connections(stream: Stream, *, spark: bool, as_json: bool) -> None:
    from headrace.checks.connecting import check_columns, check_connections
    from headrace.checks.kafka_rights import check_kafka_rights
    from headrace.cli.mapping import columns_by_spark, print_columns

    answers, columns = [], []

    def answered(answer: Checked) -> None:
        answers.append(answer)
        if not as_json:
            echo(f"{'ok    ' if answer.error is None else 'FAILED'} {answer}")

    for answer in chain(check_connections(stream), check_kafka_rights(stream)):
        answered(answer)
    for found in check_columns(stream, columns_by_spark(stream) if spark else {}):
        columns.append(found)
        if not as_json:
            print_columns(found)
        if found.checked is not None:
            answered(found.checked)
    failed = [answer for answer in answers if answer.error is not None]
    if as_json:
        print_json({"stream": stream.name, "ok": not failed, "checks": answers, "columns": columns})
    else:
        wrong = f"{len(failed)} of {len(answers)} checks failed" if failed else "can run, and all that it needs answers"
        echo(f"Stream {stream.name}: {wrong}.")
    if failed:
        raise typer.Exit(1)
