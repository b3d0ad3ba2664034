"""Applies the truncate of a table to the index that has its rows: all documents of older versions are deleted."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.elasticsearch import columns
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, TombstonePolicy, VersionSource
from headrace.elasticsearch.target_watch import TargetWatch
from headrace.elasticsearch.transport import Cluster

if TYPE_CHECKING:
    from headrace.elasticsearch.transport import Transport

_IDS_AT_ONCE = 10_000
"""The most documents of a page of a search, by default."""


def delete_older(transport: Transport, options: IndexingOptions, version: int) -> int:
    """Delete the documents of the index whose version is below ``version``. Returns their number.

    Each is deleted with this version, so a document that is newer by then stays, and doing it again changes nothing.
    All rows that were written must be found by searches of it: the index is refreshed first.

    Raises the errors of a write.
    """
    index, deleted = options.target.name, 0
    administration = Administration.of(
        Cluster.of(options),
        timeout_seconds=options.request_timeout_seconds,
        max_retry_seconds=options.max_retry_seconds,
    )
    with administration:
        purpose = f"Deleting the documents of index {index!r} from before a truncate of the table"
        TargetWatch(options).refresh()
        with closing(administration.older_ids(purpose, index, version, _IDS_AT_ONCE)) as pages:
            for ids in pages:
                deleted += delete_ids(transport, options, ids, version)
    return deleted


def delete_ids(transport: Transport, options: IndexingOptions, ids: list[str], version: int) -> int:
    """Delete the documents of these ids that are older than ``version``. Returns their number."""
    deleting = replace(
        options,
        document_id=DocumentIdKind.KEY,
        id_columns=(),
        version=VersionSource.COLUMN,
        tombstones=TombstonePolicy.DELETE,
    )
    rows = {
        columns.KEY: pa.array(ids, pa.large_string()),
        columns.VERSION: pa.array([version] * len(ids), pa.int64()),
        columns.DOCUMENT: pa.nulls(len(ids), pa.large_string()),
    }
    return Indexer(transport, deleting).index([pa.record_batch(rows)]).deleted
