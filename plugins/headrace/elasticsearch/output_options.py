"""Makes the sink's options from a stream's Elasticsearch output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.stream.outputs import ColumnIds, ElasticsearchOutput, KeyIds, RecordIds

if TYPE_CHECKING:
    from headrace.stream.inputs import KafkaInput

VERSION = "version"
"""The name of the prepared column with the values of ``version_from``."""
ID_PREFIX = "id_"
"""The prepared columns of the ``id_columns`` are named by this prefix and their index."""


def id_columns(output: ElasticsearchOutput) -> tuple[str, ...]:
    """The names of the transform's columns that the option ``id_columns`` stands for."""
    ids = output.document_ids
    if isinstance(ids, RecordIds):
        return ids.rows
    return ids.columns if isinstance(ids, ColumnIds) else ()


def sink_options(
    output: ElasticsearchOutput,
    *,
    stream: str = "",
    batch_time_ms: int | None = None,
    attempt: int | None = None,
    report: str | None = None,
    manifest: str | None = None,
    read_again: Sequence[KafkaInput] = (),
    earlier: Mapping[str, Sequence[str]] | None = None,
    inputs: Sequence[KafkaInput] = (),
    written_before: bool = False,
) -> dict[str, str]:
    """The sink's options for rows from ``prepare_documents``; none of them is a secret.

    Args:
        manifest: the URI of the batch's manifest. This and the next three serve to find the records of dead letters.
        read_again: the stream's inputs, if the batch's records are only in Kafka.
        earlier: for a window, the manifest URIs of its other batches, by where their records are: "log" or "kafka".
        inputs: the stream's inputs, for the batches in "kafka".
        written_before: whether an earlier attempt may have written this batch to this output.
    """
    options: dict[str, str | None] = {
        "connection": output.connection,
        "hosts": ",".join(output.hosts) or None,
        "index": output.index,
        "document_id": output.document_ids.kind,
        "tombstones": output.tombstones,
        "dead_letter_index": output.dead_letter_index,
        "bulk_bytes": str(output.bulk_bytes),
        "bulk_actions": str(output.bulk_actions),
        "requests_in_flight": str(output.requests_in_flight),
        "request_timeout_seconds": str(output.request_timeout_seconds),
        "max_retry_seconds": str(output.max_retry_seconds),
        "refresh": str(output.refresh).lower(),
        "write_method": output.write_method,
        "stream": stream,
        "output": output.id,
        "batch_time": None if batch_time_ms is None else str(batch_time_ms),
        "attempt": None if attempt is None else str(attempt),
        "report": report,
        "manifest": manifest,
        "written_before": str(written_before).lower(),
    }
    if read_again:
        options["originals"] = "kafka"
    if earlier:
        options["earlier"] = json.dumps({where: list(uris) for where, uris in earlier.items()})
    if read_again or (earlier and earlier.get("kafka")):
        options["inputs"] = json.dumps([source.model_dump(mode="json") for source in read_again or inputs])
    ids = output.document_ids
    options["id_columns"] = ",".join(f"{ID_PREFIX}{index}" for index in range(len(id_columns(output)))) or None
    if isinstance(ids, ColumnIds):
        options["id_batch_time"] = str(ids.with_batch_time).lower()
    if isinstance(ids, KeyIds) and ids.version_from:
        options["version_from"] = VERSION
    return {name: value for name, value in options.items() if value is not None}
