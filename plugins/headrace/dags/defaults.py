"""Settings that the DAGs of all streams share: start date, tags, and the description of a stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.stream import ElasticsearchOutput, ForeachBatchOutput, KafkaOutput, ParquetOutput, ReceiverInput

if TYPE_CHECKING:
    from headrace.stream import Output, Stream

# Airflow needs a start date to schedule a DAG. It has to be the same at every parse, or the DAG would change at every
# parse. The timetable decides which batches are run.
START_DATE = datetime(2020, 1, 1, tzinfo=UTC)


def tags(stream: Stream, kind: str) -> list[str]:
    """The tags of a stream's DAGs, to filter by in the UI."""
    return ["headrace", kind, f"stream:{stream.name}"]


def declaration(stream: Stream, kind: str) -> str:
    """The JSON documentation of one task of each DAG: the stream's name, and its ledger as the user wrote it.

    Airflow keeps it with the serialised DAG, where the API server finds the stream and its ledger without importing the
    DAG's file. A ledger's URL has no secret: a stream's definition is refused if it has one.
    """
    return json.dumps({"headrace": {"stream": stream.name, "ledger": stream.ledger, "kind": kind}})


def _place(output: Output) -> tuple[str, str]:
    """The system that an output writes to, and the target within it."""
    if isinstance(output, ElasticsearchOutput):
        where = f"connection `{output.connection}`" if output.connection else ", ".join(output.hosts)
        return f"Elasticsearch, {where}", f"index `{output.index}`, ids by {output.document_ids.kind}"
    if isinstance(output, KafkaOutput):
        where = f"connection `{output.connection}`" if output.connection else f"`{output.bootstrap_servers}`"
        return f"Kafka, {where}", f"topic `{output.topic}`"
    if isinstance(output, ParquetOutput):
        return "Parquet files", f"`{output.path}`"
    if isinstance(output, ForeachBatchOutput):
        return "function", f"`{output.function}`"
    return output.kind, ""


def describe(stream: Stream) -> str:
    """The stream in Markdown, for a DAG's page."""
    interval = stream.batch_interval.total_seconds()
    lines = [
        f"Every {interval:g} s by {stream.batch_by}, blocks of {stream.block_interval_ms} ms.",
        "",
        "| | | |",
        "| --- | --- | --- |",
    ]
    for source in stream.inputs:
        if isinstance(source, ReceiverInput):
            lines.append(f"| from | `{source.receiver}` | {source.id}, {source.receivers} receiver(s) |")
            continue
        what = ", ".join(source.topics) or f"topics matching `{source.topic_pattern}`"
        where = f"connection `{source.connection}`" if source.connection else f"`{source.bootstrap_servers}`"
        lines.append(f"| from | Kafka, {where} | {what}, {source.receivers} receiver(s) |")
    if stream.transform:
        lines.append(f"| through | `{stream.transform}` | |")
    if stream.state:
        lines.append(f"| state | `{stream.state.update}` | |")
    for output in stream.outputs:
        where, what = _place(output)
        if output.transform:
            what = ", ".join(filter(None, (what, f"through `{output.transform}`")))
        if output.window:
            what = ", ".join(filter(None, (what, f"of the last {output.window.length.total_seconds():g} s")))
        lines.append(f"| to `{output.id}` | {where} | {what} |")
    lines += [
        f"| log | `{stream.storage.url}` | kept {stream.remember_ms // 1000} s after the checkpoint |",
        f"| ledger | `{stream.ledger}` | |",
        # With the digest, every change of the definition, in whatever field, makes a new DAG version in Airflow. A run
        # keeps the code of its version, and the ledger orders definitions by the time of their DAG versions.
        f"| definition | `{stream.digest}` | |",
    ]
    return "\n".join(lines)
