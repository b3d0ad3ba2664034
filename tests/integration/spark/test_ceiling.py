"""The ceiling of an Elasticsearch output over the tasks of a Spark job, counted by the server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.json_server import JsonHandler, JsonServer

from headrace.batch.manifest import Manifest
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.spark.outputs.elasticsearch_sink import index_blocks, index_rows
from headrace.spark.records.wal_source import LogBlocks
from headrace.stream import ElasticsearchOutput

ROWS = 800
SIZE = 2600


@dataclass
class CountingServer:
    """Elasticsearch in memory, over HTTP. ``bulks``: when each bulk request came, and its bytes."""

    url: str = ""
    bulks: list[tuple[float, int]] = field(default_factory=list)
    elasticsearch: FakeElasticsearch = field(default_factory=FakeElasticsearch)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/":
            version = {"distribution": "opensearch", "number": "3.0.0"}
            return 200, json.dumps({"version": version}).encode()
        if "_bulk" in path:
            self.bulks.append((time.monotonic(), len(body)))
        response = self.elasticsearch.request(method, path, body)
        return response.status, response.body


@pytest.fixture
def counting() -> Iterator[CountingServer]:
    counted = CountingServer()

    class Handler(JsonHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            self.answer(*counted.answer(self.command, self.path, body))

        do_GET = do_POST  # noqa: N815

    server = JsonServer(Handler)
    counted.url = server.url
    yield counted
    server.close()


@pytest.mark.parametrize("way", ["rows", "blocks"])
@pytest.mark.parametrize("ceiling", [{"max_requests_per_second": 20.0}, {"max_bytes_per_second": 1_000_000}])
def test_all_tasks_of_a_batch_stay_below_its_ceiling(
    spark: SparkSession, counting: CountingServer, blocks: LogBlocks, *, way: str, ceiling: dict[str, float]
) -> None:
    """Three partitions of rows are two tasks, as many as run at once; the blocks are large enough for two."""
    output = ElasticsearchOutput(hosts=counting.url, index="shop", bulk_actions=20, **ceiling)
    options = IndexingOptions.of(output, Target.of(output, "clicks"), batch_time_ms=1)
    # A worker that has to start would give the tasks more time than they need.
    index_rows(_rows(spark, 2), replace(options, max_requests_per_second=None, max_bytes_per_second=None))
    counting.bulks.clear()
    started = time.monotonic()
    if way == "rows":
        counts = index_rows(_rows(spark, ROWS), options).counts
    else:
        assert blocks.number_of_tasks(2) == 2
        run = lambda task, blocks, schema: blocks.run(spark, 2, task, schema)  # noqa: E731
        counts = index_blocks(run, options, blocks).counts
    assert (counts.created + counts.repeated, counts.ceiling_seconds > 0) == (ROWS, True)
    (most,) = ceiling.values()
    sent = 0
    for at, size in counting.bulks:
        sent += size if "max_bytes_per_second" in ceiling else 1
        assert sent <= most * (at - started)


@pytest.fixture
def blocks(written_log: Any, make_records: Any) -> LogBlocks:
    """Two blocks, which their compression leaves large."""
    for first in range(0, ROWS, ROWS // 2):
        values = [b'{"n": "%b"}' % os.urandom(SIZE // 2).hex().encode() for _ in range(ROWS // 2)]
        written_log.add(make_records(values, first_offset=first))
    return LogBlocks.of([Manifest.load(written_log.manifest())], "records")


def _rows(spark: SparkSession, number: int) -> DataFrame:
    """In three partitions."""
    document = f"CAST(concat('{{\"n\": \"', repeat('x', {SIZE}), '\"}}') AS BINARY) value"
    return spark.range(0, number, 1, 3).selectExpr("'t' topic", "0 partition", "id offset", document)
