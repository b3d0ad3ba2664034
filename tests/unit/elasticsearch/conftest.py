"""Rows, options and an Elasticsearch in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.indexing_options import indexing_options

from headrace.clock import ManualClock
from headrace.elasticsearch.options import IndexingOptions

MakeOptions = Callable[..., IndexingOptions]
MakeRows = Callable[..., pa.RecordBatch]


class ImpatientClock(ManualClock):
    """A clock on which every wait is over at once, and its time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, event: Any, seconds: float) -> bool:
        self.waits.append(seconds)
        self.advance(int(seconds * 1000) + 1)
        return bool(event.is_set())


@pytest.fixture
def clock() -> ImpatientClock:
    return ImpatientClock()


@pytest.fixture
def elasticsearch() -> FakeElasticsearch:
    return FakeElasticsearch()


@pytest.fixture
def make_options() -> MakeOptions:
    def make(**options: Any) -> IndexingOptions:
        """Options of these fields, with strings for the kinds of ids and the like."""
        return indexing_options(**{"hosts": ["http://127.0.0.1:9200"], **options})

    return make


@pytest.fixture
def make_rows() -> MakeRows:
    def make(
        values: Sequence[Any],
        *,
        offsets: Sequence[int] | None = None,
        keys: Sequence[bytes | None] | None = None,
        incarnations: Sequence[int | None] | None = None,
        **more: Any,
    ) -> pa.RecordBatch:
        """Rows of topic "t", partition 0, from offset 0; values that are dicts become JSON."""
        encoded = [json.dumps(value).encode() if isinstance(value, dict) else value for value in values]
        columns: dict[str, Any] = {
            "topic": pa.array(["t"] * len(values)),
            "partition": pa.array([0] * len(values), pa.int32()),
            "offset": pa.array(range(len(values)) if offsets is None else offsets, pa.int64()),
            "value": pa.array(encoded, pa.binary()),
        }
        if keys is not None:
            columns["key"] = pa.array(keys, pa.binary())
        if incarnations is not None:
            columns["incarnation"] = pa.array(incarnations, pa.int32())
        return pa.record_batch({**columns, **more})

    return make
