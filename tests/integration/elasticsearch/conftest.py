"""An index name of its own for each test, and what it takes to index into it."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.support.indexing_options import indexing_options

from headrace.clock import SystemClock
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import RetryBudget
from headrace.elasticsearch.target import ConcreteIndex
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, Response

Rows = Callable[..., pa.RecordBatch]


class RealIndex:
    """One test's index on the real server, and questions to the server about it."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.transport = ElasticsearchTransport(Cluster.of(self.options()), connections=4, timeout_seconds=30)

    def options(self, **options: Any) -> IndexingOptions:
        return indexing_options(**{"hosts": [self.url], "index": self.name, **options})

    def index(self, *batches: pa.RecordBatch, **options: Any) -> IndexingCounts:
        return Indexer(self.transport, self.options(**options)).index(batches)

    def concrete(self) -> ConcreteIndex | None:
        """The index behind the name."""
        budget = RetryBudget("Asking", max_seconds=30, clock=SystemClock(), cancelled=threading.Event())
        return OpenTarget(self.transport, self.options().target).concrete(budget)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        response: Response = self.transport.request(method, path, None if body is None else json.dumps(body).encode())
        assert response.status < 300, response
        return response.json()

    def documents(self, name: str | None = None) -> dict[str, Any]:
        """The documents by id."""
        return {hit["_id"]: hit["_source"] for hit in self._hits(name)}

    def versions(self) -> dict[str, tuple[int, int]]:
        """(version, sequence number) by id: both stay when nothing is written."""
        return {hit["_id"]: (hit["_version"], hit["_seq_no"]) for hit in self._hits(None)}

    def _hits(self, name: str | None) -> list[dict[str, Any]]:
        index = name or self.name
        self.ask("POST", f"/{index}/_refresh")
        found = self.ask("GET", f"/{index}/_search", {"size": 10_000, "version": True, "seq_no_primary_term": True})
        hits: list[dict[str, Any]] = found["hits"]["hits"]
        return hits


@pytest.fixture(scope="session")
def real_index() -> type[RealIndex]:
    """For a server of a test's own."""
    return RealIndex


@pytest.fixture(scope="module")
def search_server(elasticsearch: str) -> str:
    """The URL of the server of these tests; test_search_servers.py has others."""
    return elasticsearch


@pytest.fixture
def real(search_server: str) -> Iterator[RealIndex]:
    index = RealIndex(search_server, f"sink-{uuid.uuid4().hex[:12]}")
    yield index
    for name in index.ask("GET", f"/{index.name}*/_settings?filter_path=*.settings.index.provided_name"):
        # A data stream's index stays: it goes with the data stream only, which this server cannot delete.
        index.transport.request("DELETE", f"/{name}")
    index.transport.close()


@pytest.fixture(scope="session")
def rows() -> Rows:
    def make(
        values: Sequence[bytes | None], *, first: int = 0, keys: Sequence[bytes | None] | None = None
    ) -> pa.RecordBatch:
        columns: dict[str, Any] = {
            "topic": pa.array(["t"] * len(values)),
            "partition": pa.array([0] * len(values), pa.int32()),
            "offset": pa.array(range(first, first + len(values)), pa.int64()),
            "value": pa.array(values, pa.binary()),
        }
        if keys is not None:
            columns["key"] = pa.array(keys, pa.binary())
        return pa.record_batch(columns)

    return make
