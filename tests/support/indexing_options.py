"""Options of a write to an index, for tests: of a few fields, with plain values."""

from __future__ import annotations

from typing import Any

from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, TombstonePolicy, WriteMethod

_KINDS = {"document_id": DocumentIdKind, "write_method": WriteMethod, "tombstones": TombstonePolicy}


def indexing_options(**fields: Any) -> IndexingOptions:
    """The options with these fields: strings for the kinds of ids and the like, and lists for tuples."""
    fixed = {"index": "clicks", "dead_letter_index": f"{fields.get('index', 'clicks')}-dead-letters"}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    kinds = {name: kind(given[name]) for name, kind in _KINDS.items() if given.get(name) is not None}
    return IndexingOptions(**{**fixed, **given, **kinds})
