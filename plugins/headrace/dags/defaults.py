"""What the DAGs of all streams have in common."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.stream import Stream

# Airflow wants a start date before anything is scheduled. It has to be the same at every parse, or the DAG would
# change at every parse; which batches are run is decided by the timetable.
START_DATE = datetime(2020, 1, 1, tzinfo=UTC)


def batch_retries() -> dict[str, Any]:
    """Retries of a batch's tasks: quick at first, for a server that restarts, then patient."""
    return {
        "retries": 4,
        "retry_delay": timedelta(seconds=5),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=2),
    }


def tags(stream: Stream, kind: str) -> list[str]:
    """The tags by which the UI finds a stream's DAGs."""
    return ["headrace", kind, f"stream:{stream.name}"]


def describe(stream: Stream) -> str:
    """The stream in Markdown, for a DAG's page."""
    lines = [
        f"Every {stream.batch_interval.total_seconds():g} s, blocks of {stream.block_interval_ms} ms.",
        "",
        "| | | |",
        "| --- | --- | --- |",
    ]
    for source in stream.inputs:
        what = ", ".join(source.topics) or f"topics matching `{source.topic_pattern}`"
        where = f"connection `{source.connection}`" if source.connection else f"`{source.bootstrap_servers}`"
        lines.append(f"| from | Kafka, {where} | {what}, {source.receivers} receiver(s) |")
    if stream.transform:
        lines.append(f"| through | `{stream.transform}` | |")
    for output in stream.outputs:
        if output.kind == "elasticsearch":
            where = f"connection `{output.connection}`" if output.connection else ", ".join(output.hosts)
            ids = f"ids by {output.document_ids.kind}"
            lines.append(f"| to | Elasticsearch, {where} | index `{output.index}`, {ids} |")
        else:
            lines.append(f"| to | {output.kind} | |")
    lines += [
        f"| log | `{stream.storage.url}` | kept {stream.remember_ms // 1000} s after the checkpoint |",
        f"| ledger | `{stream.ledger}` | |",
    ]
    return "\n".join(lines)
