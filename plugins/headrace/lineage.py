"""The lineage of batches for OpenLineage: which offsets of which topics went into which indices, topics and files.

Datasets are named by OpenLineage's conventions: the namespace is the server, the name the topic, index or path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import InputDatasetFacet, RunFacet, output_statistics_output_dataset

from headrace.clock import time_text
from headrace.connections import Connection, from_text
from headrace.runs.processes import connection_json
from headrace.stream.model import load_reference
from headrace.stream.outputs import Dataset

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt
    from headrace.stream import (
        DeadLetterTopic,
        ElasticsearchOutput,
        KafkaInput,
        KafkaOutput,
        Output,
        ParquetOutput,
        Stream,
    )


# What the outputs call their rows and bytes.
_ROWS = ("created", "updated", "messages", "rows")


@attr.define
class OffsetRange:
    """The offsets ``[fromOffset, untilOffset)`` of a partition, with ``records`` records.

    ``incarnation`` is 1 for the first topic of this name, and grows when the topic is deleted and created again.
    """

    partition: int
    fromOffset: int  # noqa: N815 - OpenLineage's names are in camel case
    untilOffset: int  # noqa: N815
    records: int
    incarnation: int = 1


@attr.define
class OffsetRangesFacet(InputDatasetFacet):
    """What a batch has read of a topic: the facet ``headrace_offsets`` of an input dataset."""

    ranges: list[OffsetRange] = attr.field(factory=list)


@attr.define
class BatchFacet(RunFacet):
    """The batches that a task has run: the facet ``headrace_batches`` of a run."""

    stream: str
    batchTimes: list[str] = attr.field(factory=list)  # noqa: N815
    """Batch times in ISO 8601."""
    target: str = ""
    """The name of the replay, "" if the batches were run themselves."""


def batch_lineage(ledger: Ledger, written: Stream, attempts: Iterable[Attempt]) -> OperatorLineage[Any, Any]:
    """Return the lineage of some attempts of a task: topics with their offset ranges, and what their outputs wrote.

    An output that has not recorded its success is left out.

    Args:
        written: the definition that the attempts write by; of a replay, the replay's.
    """
    ran = list(attempts)
    if not ran:
        return OperatorLineage()
    times = sorted({attempt.batch_time_ms for attempt in ran})
    facet = BatchFacet(stream=ran[0].stream, batchTimes=[time_text(time_ms) for time_ms in times], target=ran[0].target)
    return OperatorLineage(
        inputs=_inputs(ledger, written, ran[0].stream, times),
        outputs=_outputs(ledger, written, ran),
        run_facets={"headrace_batches": facet},
    )


def _inputs(ledger: Ledger, written: Stream, stream_name: str, times: Iterable[int]) -> list[InputDataset]:
    sources = {source.id: source for source in written.inputs}
    ranges: dict[Dataset, list[OffsetRange]] = defaultdict(list)
    for batch_time_ms in times:
        for row in ledger.batches.inputs(stream_name, batch_time_ms):
            source = sources.get(row.input_id)
            if source is None or source.datasets is None:
                # The stream's definition has lost this input since, or its kind has no dataset.
                continue
            partition = row.partition
            function: Any = load_reference(source.datasets, f"datasets of input {source.id!r}")
            ranges[function(source, partition.topic, _connection)].append(
                OffsetRange(partition.partition, row.from_offset, row.until_offset, row.records, partition.incarnation)
            )
    return [
        InputDataset(
            namespace=dataset.namespace,
            name=dataset.name,
            inputFacets={"headrace_offsets": OffsetRangesFacet(ranges=dataset_ranges)},
        )
        for dataset, dataset_ranges in ranges.items()
    ]


def _outputs(ledger: Ledger, written: Stream, ran: Iterable[Attempt]) -> list[OutputDataset]:
    outputs = {output.step: output for output in written.outputs}
    rows: dict[Dataset, int] = defaultdict(int)
    for attempt in ran:
        recorded = ledger.attempts.outputs(attempt.stream, attempt.batch_time_ms, target=attempt.target)
        for row in recorded:
            output = outputs.get(row.output_id)
            if output is None or row.attempt != attempt.number or row.error is not None:
                continue
            for name, number in datasets_of(output, row.counts).items():
                rows[name] += number
    return [_dataset(name, count) for name, count in rows.items()]


def _dataset(name: Dataset, rows: int) -> OutputDataset:
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=rows)
    return OutputDataset(namespace=name.namespace, name=name.name, outputFacets={"outputStatistics": statistics})


def _written(counts: Mapping[str, Any]) -> int:
    if "created" in counts:
        return int(counts["created"]) + int(counts.get("updated") or 0)
    return next((int(counts[name]) for name in _ROWS if name in counts), 0)


_KAFKA_PORT = 9092


def topic_name(source: KafkaInput | KafkaOutput | DeadLetterTopic, topic: str, _: object = None) -> Dataset:
    """The name of a topic: the namespace has the first of the bootstrap servers."""
    from headrace.kafka.client import bootstrap_servers

    servers = source.bootstrap_servers
    if source.connection is not None:
        servers = bootstrap_servers(_connection(source.connection))
    host = str(servers).split(",", maxsplit=1)[0].strip().rpartition("//")[2]
    return Dataset(f"kafka://{host if ':' in host else f'{host}:{_KAFKA_PORT}'}", topic)


def datasets_of(output: Output, counts: Mapping[str, Any]) -> dict[Dataset, int]:
    """The datasets that an output wrote, with the number of rows; none for the console and for functions."""
    if output.datasets is None:
        return {}
    function: Any = load_reference(output.datasets, f"datasets of output {output.id!r}")
    return dict(function(output, counts, _connection))


def index_datasets(output: ElasticsearchOutput, counts: Mapping[str, Any], _: object) -> dict[Dataset, int]:
    """The index, or those of the rows; and the index or topic of the dead letters if there were any."""
    from headrace.batch.places import written_places

    by_index = counts.get("by_index")
    rows = {
        index_name(output, str(place["name"])): _written(counts) if by_index is None else by_index.get(place["name"], 0)
        for place in written_places(output, counts)
    }
    letters = int(counts.get("dead_lettered") or 0)
    if not letters:
        return rows
    topic = output.dead_letter_topic
    return {
        **rows,
        index_name(output, output.dead_letters) if topic is None else topic_name(topic, topic.topic): letters,
    }


def topic_datasets(output: KafkaOutput, counts: Mapping[str, Any], _: object) -> dict[Dataset, int]:
    """The topic."""
    return {topic_name(output, output.topic): _written(counts)}


def folder_datasets(output: ParquetOutput, counts: Mapping[str, Any], _: object) -> dict[Dataset, int]:
    """The folder of all batches."""
    return {Dataset("file", output.folder): _written(counts)}


def index_name(output: ElasticsearchOutput, index: str) -> Dataset:
    """The name of an index in the output's cluster: the namespace has the first of its nodes."""
    from headrace.elasticsearch.transport import Cluster

    if output.connection is None:
        cluster = Cluster.of(output)
    else:
        cluster = Cluster.from_connection(_connection(output.connection))
    parts = urlsplit(str(cluster.nodes[0]))
    return Dataset(f"elasticsearch://{parts.hostname}:{parts.port}", index)


def _connection(conn_id: str) -> Connection:
    return from_text(conn_id, connection_json(conn_id))
