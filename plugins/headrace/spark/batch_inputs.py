"""Reads a batch's inputs as DataFrames: the records of its own batch time, or of all batches in its window."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TYPE_CHECKING

from headrace.batch.manifest import Manifest
from headrace.spark.decoding import DecodedInput, decode_input
from headrace.spark.sessions import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.ledger.models import BatchOrigin
    from headrace.stream import KafkaInput, Stream

_MANIFEST_READERS = 8


def check_manifests(origins: Iterable[BatchOrigin]) -> None:
    """Check that each manifest is the one with which its batch was allocated.

    Raises:
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
    """
    for _ in load_manifests(origins):
        pass


def load_manifests(origins: Iterable[BatchOrigin]) -> Iterator[Manifest]:
    """Yield the manifests with which the batches were allocated, each once.

    Raises:
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
    """

    def load(origin: BatchOrigin) -> Manifest:
        return Manifest.load(origin.manifest_uri, sha256=origin.manifest_sha256)

    by_uri = {origin.manifest_uri: origin for origin in origins}
    with ThreadPoolExecutor(_MANIFEST_READERS) as pool:
        yield from pool.map(load, by_uri.values())


def read_inputs(
    spark: SparkSession, stream: Stream, origins: Sequence[BatchOrigin], partitions: int | None = None
) -> dict[str, DecodedInput]:
    """Every input of the stream, by id, with the records of all these batches, each once.

    Args:
        origins: the batches, from ``ledger.batches.origins``; if there are none, the frames are empty.
        partitions: about how many tasks read an input; by default the session's parallelism.
    """
    if partitions is None and not is_connect(spark):
        partitions = spark.sparkContext.defaultParallelism
    return {source.id: decode_input(_records(spark, source, origins, partitions), source) for source in stream.inputs}


def _records(
    spark: SparkSession, source: KafkaInput, origins: Sequence[BatchOrigin], partitions: int | None
) -> DataFrame:
    in_kafka = [origin.manifest_uri for origin in origins if origin.source == "kafka"]
    in_log = [origin.manifest_uri for origin in origins if origin.source != "kafka"]
    frames = []
    if in_log or not in_kafka:
        frames.append(_from_log(spark, source, in_log, partitions))
    if in_kafka:
        frames.append(_from_kafka(spark, source, in_kafka, partitions))
    return reduce(lambda left, right: left.unionByName(right), frames)


def _from_log(spark: SparkSession, source: KafkaInput, manifests: list[str], partitions: int | None) -> DataFrame:
    from headrace.spark.wal_source import WalDataSource

    spark.dataSource.register(WalDataSource)
    reader = spark.read.format("wal").options(manifests=json.dumps(manifests), input=source.id)
    return (reader if partitions is None else reader.option("numPartitions", partitions)).load()


def _from_kafka(spark: SparkSession, source: KafkaInput, manifests: list[str], partitions: int | None) -> DataFrame:
    from headrace.spark.kafka_ranges_source import KafkaRangesDataSource

    spark.dataSource.register(KafkaRangesDataSource)
    reader = spark.read.format("kafka_ranges").options(
        manifests=json.dumps(manifests), input=source.id, stream=source.model_dump_json()
    )
    return (reader if partitions is None else reader.option("numPartitions", partitions)).load()
