"""Options of a write to an index, for tests: of a few fields, with plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import ConcreteIndex, Owner, Target
from headrace.stream import ColumnIds, ElasticsearchOutput, KeyIds, RecordIds

_OWNER = ("stream_name", "output_id", "replay")


def indexing_options(
    *,
    index: Any = "clicks",
    document_id: str = "record",
    id_columns: list[str] | tuple[str, ...] = (),
    id_batch_time: bool = False,
    version: str | None = None,
    write_method: Any = None,
    tombstones: Any = None,
    **fields: Any,
) -> IndexingOptions:
    """The options that an output with these fields has, with the columns of ids by the names given here.

    Names of a target's fields are its; ``known_indices`` are pairs, ``through_alias`` says that the index is an alias.
    """
    ids: Any = RecordIds(rows=tuple(id_columns))
    if document_id == "key":
        ids = KeyIds(version_from=version)
    elif document_id == "columns":
        ids = ColumnIds(columns=tuple(id_columns), with_batch_time=id_batch_time)
    output = ElasticsearchOutput(
        hosts="http://127.0.0.1:9200",
        index=index,
        index_zone=fields.pop("index_zone", "UTC"),
        document_ids=ids,
        write_method=write_method,
        tombstones=tombstones,
    )
    target = Target(
        name=output.index_text,
        dead_letter_index=fields.pop("dead_letter_index", output.dead_letters),
        owner=Owner(**{name: fields.pop(name) for name in _OWNER if name in fields}),
        known=tuple(ConcreteIndex(*each) for each in fields.pop("known_indices", ())),
        known_letters_index=fields.pop("known_letters_index", None),
        concrete=ConcreteIndex(f"behind-{index}", None) if fields.pop("through_alias", False) else None,
        first_alone=fields.pop("first_alone", False),
    )
    options = IndexingOptions.of(output, target, batch_time_ms=fields.pop("batch_time_ms", 0))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return replace(options, id_columns=tuple(id_columns), **given)
