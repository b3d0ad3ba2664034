"""`headrace batches list`, `show`, `unclaimed`, `abandon` and `run`: a stream's batches, and times without a batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from headrace.batch.places import PLACE, PLACES, READERS
from headrace.cli.options import AIRFLOW_VARIABLE, AsJson, LedgerUrl, StreamName, examples, milliseconds, opened
from headrace.cli.options import batch_time as batch_time_ms
from headrace.cli.output import echo, print_json, print_table, seconds_text
from headrace.clock import time_text
from headrace.ledger.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.connections import Connection
    from headrace.devstack.airflow_api import AirflowApi
    from headrace.ledger import Ledger
    from headrace.ledger.receiving.tables import UnclaimedTime
    from headrace.views.batch_detail import Attempt, BatchDetail
    from headrace.views.batches import BatchLine

# A batch DAG that runs has allocated a batch within the larger of this time and this many intervals.
_IDLE_MS = 60_000
_IDLE_INTERVALS = 3

BatchTime = Annotated[
    str,
    typer.Argument(metavar="TIME", help="The batch's time, in ISO 8601, such as 2026-11-21T14:05Z."),
]


@examples("batches list orders --limit 50")
def list_batches(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    limit: Annotated[
        int,
        typer.Option(help="How many batches, newest first, and how many unclaimed batch times, oldest first.", min=1),
    ] = 20,
    every: Annotated[
        bool, typer.Option("--all", help="Also batch times that a later batch took over, each in a line of its own.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List a stream's batches, each with the batch times that it took over, and the unclaimed batch times."""
    from headrace.ledger.timelines import BatchOrder, BatchSelection
    from headrace.views.batches import batch_lines

    with opened(ledger) as opened_ledger:
        opened_ledger.streams.get(name)
        page = opened_ledger.batch_pages.page(name, BatchSelection(folded=not every), BatchOrder.NEWEST, limit)
        lines = batch_lines(opened_ledger, page.rows)
        waiting = _waiting(opened_ledger, name, limit=1000)
        who, now_ms = _who_takes(opened_ledger, name), opened_ledger.now_ms()
    if as_json:
        rows = [{**asdict(line.row), "error": line.error, **_next_try(line)} for line in lines]
        print_json({"batches": rows, "unclaimed": waiting})
        return
    print_table(
        ("batch time", "state", "attempt", "blocks", "records", "late", "took", "absorbed", "checkpointed", "cleaned",
         "next try", "error"),
        [
            (
                time_text(line.batch_time_ms),
                line.state,
                line.attempts,
                line.row.blocks,
                line.records,
                line.late_records,
                seconds_text(line.processing_time),
                _taken_over(line),
                "yes" if line.checkpointed else "no",
                "yes" if line.cleaned else "no",
                line.tried_again,
                line.error,
            )
            for line in lines
        ],
    )  # fmt: skip
    if waiting:
        _report_waiting(waiting[:limit], who, now_ms)
        if len(waiting) > limit:
            echo(f"And later ones: `headrace batches unclaimed {name}` lists them.")


def _next_try(line: BatchLine) -> dict[str, Any]:
    return {"next_try_ms": line.next_try_ms, "tried_again": line.tried_again}


def _taken_over(line: BatchLine) -> str | None:
    if line.row.absorbed_by_ms is not None:
        return f"by {time_text(line.row.absorbed_by_ms)}"
    return f"{line.absorbed} from {time_text(line.first_time_ms)}" if line.absorbed else None


@examples("batches show orders 2026-11-21T14:05Z")
def show(name: StreamName, batch_time: BatchTime, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Show one batch: its contents, where its records are, its attempts, and the result of each output."""
    with opened(ledger) as opened_ledger:
        interval_ms = opened_ledger.streams.get(name).batch_interval_ms
        show_batch(
            opened_ledger, name, batch_time_ms(batch_time, "BATCH_TIME", interval_ms=interval_ms), as_json=as_json
        )


@examples("batches abandon orders 2026-11-21T14:05Z --reason 'its records are damaged'")
def abandon(
    name: StreamName,
    batch_time: BatchTime,
    *,
    ledger: LedgerUrl,
    reason: Annotated[str, typer.Option(help="The reason; it is kept with the gap.")],
    output: Annotated[
        str | None, typer.Option(help="Give up only this output, which may be one that the stream no longer has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Abandon a batch that can never succeed. Its offset ranges become gaps, and its log may be deleted. Final.

    With --output the batch stays, and no longer needs that output: it completes when the others are written.
    """
    if not reason.strip():
        raise typer.BadParameter("give a reason; nothing else will explain the gap later", param_hint="--reason")
    time_ms = milliseconds(batch_time, "BATCH_TIME")
    with opened(ledger) as opened_ledger:
        if output is None:
            batch = opened_ledger.batches.abandon(name, time_ms, reason)
        else:
            batch = opened_ledger.batches.abandon_output(
                name, time_ms, opened_ledger.streams.get(name).step_of(output), reason
            )
    if as_json:
        print_json(batch)
    elif output is not None:
        echo(
            f"Output {output} of batch {time_text(batch.batch_time_ms)} of {name} is given up: its {batch.records:,} "
            f"records are not written there. The batch is {batch.state.value}."
        )
    else:
        reported = (
            f"Batch {time_text(batch.batch_time_ms)} of {name} is abandoned: {batch.records:,} records are now a gap."
        )
        echo(reported)


@examples("batches unclaimed orders")
def unclaimed(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    limit: Annotated[int, typer.Option(help="How many, oldest first.", min=1)] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the unclaimed batch times: they have passed, or a clock was ahead, and no batch has taken their blocks."""
    with opened(ledger) as opened_ledger:
        waiting = _waiting(opened_ledger, name, limit=limit)
        who, now_ms = _who_takes(opened_ledger, name), opened_ledger.now_ms()
    if as_json:
        print_json(waiting)
    elif waiting:
        _report_waiting(waiting, who, now_ms)
    else:
        echo(f"Every batch time of {name} that has passed and has blocks has its batch.")


def _waiting(ledger: Ledger, name: str, *, limit: int) -> list[UnclaimedTime]:
    """The times that have passed, and those that lie ahead of the clock."""
    from headrace.ledger.clock_corrections import CLOCK_SKEW_MS

    row, now_ms = ledger.streams.get(name), ledger.now_ms()
    open_ms, last_ms = row.batch_time_after(now_ms), row.batch_time_after(now_ms + CLOCK_SKEW_MS)
    times = ledger.blocks.unclaimed(name, limit)
    return [time for time in times if time.batch_time_ms < open_ms or time.batch_time_ms > last_ms]


def _who_takes(ledger: Ledger, name: str) -> str:
    """Say whether batches are being allocated, and what to do if none is."""
    row = ledger.streams.get(name)
    newest = next(iter(ledger.batches.page(name, limit=1)), None)
    idle_ms = None if newest is None else ledger.now_ms() - newest.allocated_at_ms
    if idle_ms is None or idle_ms > max(_IDLE_MS, _IDLE_INTERVALS * row.batch_interval_ms):
        since = "yet" if newest is None else f"since {time_text(newest.allocated_at_ms)}"
        return (
            f"No batch was allocated {since}: is the batch DAG paused, or do its runs wait or fail before they "
            "allocate one (their logs say why)? Its next runs take them."
        )
    return "The next runs of the batch DAG take them."


def _report_waiting(waiting: list[UnclaimedTime], who: str, ahead_of_ms: int) -> None:
    echo(f"Unclaimed batch times: blocks that no batch has taken yet. {who}")
    if waiting[-1].batch_time_ms > ahead_of_ms:
        echo(
            f"Some are still to come: it is {time_text(ahead_of_ms)} by the ledger's clock, which was ahead when their "
            "blocks were stored. The next batch run moves them back, unless a batch was allocated ahead "
            "(`headrace streams list` says so)."
        )
    print_table(
        ("batch time", "blocks", "records"), [(time_text(t.batch_time_ms), t.blocks, t.records) for t in waiting]
    )


# The key under which an Elasticsearch output records its concrete index, beside the counts.
_INDEX = "index"
_INDICES_SHOWN = 5


def show_batch(ledger: Ledger, stream_name: str, batch_time_ms: int, *, as_json: bool) -> None:
    """Print the batch, or the blocks that wait for a batch time that is not allocated.

    Raises:
        StreamNotFoundError: there is no such stream.
        LedgerError: the time is before the stream began.
    """
    from headrace.ledger.errors import BatchNotFoundError
    from headrace.views.batch_detail import batch_detail

    try:
        batch = batch_detail(ledger, stream_name, batch_time_ms)
    except BatchNotFoundError:
        _show_waiting(ledger, stream_name, batch_time_ms, as_json=as_json)
        return
    if as_json:
        _print_rows(batch)
    else:
        _print_batch(batch)


def _print_rows(batch: BatchDetail) -> None:
    """The rows that the batch is shown by; of outputs only its own: those of replays are with their attempts."""
    rows = batch.rows
    revisions = {attempt.number: attempt.revision for attempt in rows.attempts}
    written = [{**asdict(output), "revision": revisions.get(output.attempt)} for output in rows.outputs]
    parts: dict[str, Any] = {"batch": rows.batch, "origin": rows.origin, "inputs": rows.inputs, "outputs": written}
    print_json({**parts, "attempts": rows.attempts, **_next_try(batch)})


def _print_batch(batch: BatchDetail) -> None:
    for line in account(batch):
        echo(line)
    print_table(
        ("input", "topic", "partition", "from", "until", "records"),
        [(i.input, i.topic, i.partition, i.from_offset, i.until_offset, i.records) for i in batch.ranges],
    )
    own = [output for output in batch.outputs if output.target is None]
    print_table(
        ("output", "state", "attempt", "definition", "written to", "counts", "transform and code", "error"),
        [
            (
                output.id,
                output.state,
                output.attempt,
                output.revision,
                _written_to(output.counts),
                _counts(output.counts),
                output.code_version,
                output.error,
            )
            for output in own
        ],
    )
    for output in own:
        if output.throttled:
            echo(f"Output {output.id} was {output.throttled}.")
    if len(known := {output.revision for output in own if output.attempt is not None}) > 1:
        named = ", ".join(
            "unknown" if number is None else str(number) for number in sorted(known, key=lambda n: n or 0)
        )
        echo(f"The outputs of this batch were written under different definitions of the stream: {named}.")
    print_table(
        ("attempt", "at", "replay", "definition", "outputs", "read from", "way", "state", "took", "holder", "error"),
        [_attempt(attempt) for attempt in batch.all_attempts],
    )


def _show_waiting(ledger: Ledger, stream_name: str, batch_time_ms: int, *, as_json: bool) -> None:
    waiting = next((u for u in ledger.blocks.unclaimed(stream_name) if u.batch_time_ms == batch_time_ms), None)
    row = ledger.streams.get(stream_name)
    if waiting is None and batch_time_ms <= row.zero_time_ms and not row.has_removed(batch_time_ms):
        raise LedgerError(
            f"Stream {stream_name!r} began at {time_text(row.zero_time_ms)}, so it has no batch "
            f"{time_text(batch_time_ms)}.",
            remedy=f"Its first batch is {time_text(row.zero_time_ms + row.batch_interval_ms)}.",
        )
    if as_json:
        print_json({"batch": None, "waiting": waiting})
        return
    if row.has_removed(batch_time_ms):
        echo(
            f"Batch {time_text(batch_time_ms)} of {stream_name} was removed, with all batches up to "
            f"{time_text(row.removed_until_ms)}: the stream keeps its batches for limits.history."
        )
        return
    held = "nothing" if waiting is None else f"{waiting.records:,} records in {waiting.blocks:,} blocks"
    echo(f"Batch {time_text(batch_time_ms)} of {stream_name} is not allocated yet; the log holds {held} for it.")
    if waiting is not None and batch_time_ms <= ledger.now_ms():
        echo("Its DAG run allocates it, or else the next scheduled run; a backfill of its interval does too.")


def account(batch: BatchDetail) -> Iterator[str]:
    """Describe the batch in sentences."""
    row = batch.rows.batch
    yield (
        f"Batch {time_text(batch.batch_time_ms)} of {row.stream}: {batch.state}. "
        f"It holds {batch.records:,} records in {row.blocks:,} blocks."
    )
    if batch.built:
        yield "It was built from Kafka by timestamps. Its number of records is an upper bound: no block counted them."
    if batch.late_records:
        yield f"{batch.late_records:,} of them arrived after the batch of their timestamps was sealed."
    if batch.absorbed:
        times = ", ".join(map(time_text, batch.absorbed_times_ms))
        yield f"It took over the blocks of {batch.absorbed} earlier batch time(s) that no run had taken: {times}."
    if batch.absorbed_by_ms is not None:
        yield f"Batch {time_text(batch.absorbed_by_ms)} took its blocks over."
    if batch.rows.origin is not None:
        where = "the log" if batch.where == "log" else "Kafka, by its offset ranges: the log no longer has them"
        # Nothing but the log has these.
        lost = "" if batch.where == "log" else " (Records of a custom receiver cannot be read again.)"
        yield f"Run again, it is read from {where}.{lost} Its manifest is {batch.manifest}."
    yield from _read_by(batch)
    for step, reason in row.abandoned_steps.items():
        yield f"Its output {step} was given up, and lacks its records: {reason}"
    if batch.error:
        yield f"Error: {batch.error}"
    if batch.tried_again:
        yield f"The repair tries it again {batch.tried_again}."
    if batch.became:
        yield batch.became


def _read_by(batch: BatchDetail) -> Iterator[str]:
    facts = [
        fact for output in batch.outputs if output.target is None for fact in output.counts.get(READERS, {}).items()
    ]
    for where, reader in sorted(dict(facts).items()):
        schema = f"version {reader['version']} of subject {reader['subject']}" if "subject" in reader else "its schema"
        yield f"{where.partition(' ')[0]} reads by {schema}, with the registry of connection {reader['registry']}."


def _attempt(attempt: Attempt) -> tuple[object, ...]:
    return (
        attempt.number,
        time_text(attempt.started_at_ms),
        attempt.target,
        attempt.revision,
        ", ".join(attempt.outputs),
        attempt.source,
        attempt.way,
        attempt.state,
        seconds_text(attempt.duration),
        f"{attempt.holder} (repair)" if attempt.by_repair else attempt.holder,
        attempt.error,
    )


def _written_to(counts: dict[str, Any]) -> str | None:
    names = [str(place["index"] or place["name"]) for place in counts.get(PLACES, ())]
    if not names:
        return counts.get(_INDEX)
    more = len(names) - _INDICES_SHOWN
    return ", ".join(names[:_INDICES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _counts(counts: dict[str, Any]) -> str:
    return (
        ", ".join(
            f"{name} {f'{value:.1f}' if isinstance(value, float) else value}"
            for name, value in counts.items()
            if name not in (_INDEX, PLACE, PLACES, READERS) and value not in (0, {}, None)
        )
        or "nothing"
    )


# Airflow's own types for a server that is reached by HTTP.
_TYPES = ("http", "https")


@examples(
    "batches run orders 2026-11-21T14:05Z --reason 'the mapping was corrected'",
    "batches run orders 2026-11-21T14:05Z --output orders-es --preview",
)
def run(
    name: StreamName,
    batch_time: BatchTime,
    *,
    airflow: Annotated[
        str,
        typer.Option(
            "--airflow",
            envvar=AIRFLOW_VARIABLE,
            metavar="CONNECTION",
            help="The id of the connection to Airflow's API server: its host, and a user who may run the batch DAG.",
        ),
    ],
    output: Annotated[
        list[str] | None, typer.Option(help="Only this output; may be given several times. By default all.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="The reason; it is kept with the stream's events.")] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Only say what it would do, or why not.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a batch again, with the same records: clear its Airflow run, or trigger one.

    It returns when Airflow has queued the run. `headrace batches show` follows it.
    """
    path = f"//headrace/api/v1/streams/{name}/batches/{milliseconds(batch_time, 'TIME')}/run"
    api = _api(airflow)
    if preview:
        query = f"?{urlencode({'outputs': output}, doseq=True)}" if output else ""
        plan = api.request("GET", f"{path}/preview{query}")
        print_json(plan) if as_json else echo(plan["refused"] or plan["will"])
        return
    done = api.request("POST", path, {"reason": reason, "outputs": output})
    print_json(done) if as_json else echo(done["done"])


def _api(conn_id: str) -> AirflowApi:
    from headrace.connections import resolve
    from headrace.devstack.airflow_api import AirflowApi

    connection = resolve(conn_id)
    connection.check_type(*_TYPES)
    return AirflowApi(_url(connection), connection.login or "", connection.password or "")


def _url(connection: Connection) -> str:
    """The server's URL. As in Airflow's HTTP connections, the scheme is in the host, or is the schema."""
    host = connection.host or "localhost"
    if "://" not in host:
        scheme = (connection.schema or connection.conn_type or "http").lower()
        host = f"{scheme}://{host}"
    return f"{host.rstrip('/')}:{connection.port}" if connection.port else host
