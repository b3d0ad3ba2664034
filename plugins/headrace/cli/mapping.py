"""`headrace mapping`: the mapping of an output's documents, printed or applied; and the table of what an index makes of
them, for `headrace streams check --connect`."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import (
    AsJson,
    OptionalLedgerUrl,
    configured_ledger,
    defined,
    examples,
    opened,
    registered,
    stream_names,
)
from headrace.cli.output import echo, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.checks.connecting import CheckedColumns
    from headrace.elasticsearch.document_mapping import MappingBody
    from headrace.errors import HeadraceError
    from headrace.formats.index_names import IndexNames
    from headrace.stream import Stream


@examples(
    "mapping pipelines.orders:stream",
    "mapping orders --as index-template",
    "mapping orders --output elasticsearch --apply",
)
def mapping(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The stream's name; or its definition, a JSON file or module:attribute.",
            autocompletion=stream_names,
        ),
    ],
    *,
    ledger: OptionalLedgerUrl,
    output: Annotated[
        str | None, typer.Option(help="The id of the Elasticsearch output, if the stream has several.")
    ] = None,
    sent_as: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="mapping|index-template|component-template",
            help="What it is sent as: with a new index, in a template for the index, or in a part of templates.",
        ),
    ] = "mapping",
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Create the index, or the template, of the output's index name, if there is none."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a mapping for an output's documents, made from their columns: the body of a request that creates the index.

    If a transform makes the columns, Spark is started here, and the transform is called without records. --apply sends
    the body, and changes nothing that exists: if there is such an index or template, it says what that lacks and exits
    with 1, with 0 if that has all of it.
    """
    from headrace.checks.connecting import DocumentColumns
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.document_mapping import MappingBody, document_fields, index_body
    from headrace.elasticsearch.mapping_conflicts import check_names
    from headrace.elasticsearch.transport import Cluster
    from headrace.views.dead_letters import elasticsearch_output

    try:
        kind = MappingBody(sent_as)
    except ValueError:
        choices = ", ".join(MappingBody)
        raise typer.BadParameter(f"{sent_as!r} is none of {choices}", param_hint="--as") from None
    stream = _stream(name, ledger)
    declared = elasticsearch_output(stream, output)
    made = columns_by_spark(stream, declared.id).get(declared.id)
    known = DocumentColumns.of(stream, declared, made)
    fields = document_fields(known.columns)
    check_names(declared.id, fields)
    names = declared.names
    letters = [each.dead_letters for each in stream.elasticsearch_outputs if each.dead_letters]
    called = _name_of(kind, names, declared.id, letters) or declared.step
    body = kind.body(names.patterns, index_body(fields, as_recorded=known.as_recorded))
    shown = {"output": declared.id, "index": names.text, "path": kind.path(called), "body": body}
    if not apply:
        print_json(shown, without_times=("body",)) if as_json else typer.echo(json.dumps(body, indent=2))
        return
    with Administration.of(
        Cluster.of(declared), timeout_seconds=declared.request_timeout_seconds, max_retry_seconds=0
    ) as administration:
        lacks = administration.create(kind, called, body)
    made_of = "index" if kind is MappingBody.MAPPING else kind.value.replace("-", " ")
    if as_json:
        print_json({**shown, "created": lacks is None, "lacks": lacks or []}, without_times=("body",))
    elif lacks is None:
        echo(f"Created the {made_of} {called}.")
    elif lacks:
        echo(f"The {made_of} {called} exists, and nothing is changed. It differs:")
        for each in lacks:
            echo(f"  {each}")
    else:
        echo(f"The {made_of} {called} exists and has all of it; nothing is changed.")
    if lacks:
        raise typer.Exit(1)


def _name_of(kind: MappingBody, names: IndexNames, output_id: str, letters: Sequence[str]) -> str:
    """The name of the index or template; "" if that is the output's. ``letters``: the stream's dead-letter indices.

    Raises MappingError if this kind cannot be for the output's indices.
    """
    from headrace.elasticsearch.document_mapping import MappingBody
    from headrace.elasticsearch.errors import MappingError

    if names.is_plain:
        return names.text
    if kind is MappingBody.MAPPING:
        raise MappingError(
            f"Output {output_id} has an index for each record, {names.text}, so there is no one index to create.",
            remedy="Make a template for all of them, with --as index-template or --as component-template.",
        )
    if kind is MappingBody.COMPONENT_TEMPLATE:
        return names.common
    if any(pattern.startswith("*") for pattern in names.patterns):
        raise MappingError(
            f"A template for the indices of output {output_id}, {names.text}, would be for others of the cluster too: "
            "their names have no text at their beginning.",
            remedy="Begin the name with a text; or make a component template, and name it in index templates of your "
            "own.",
        )
    met = [(pattern, name) for pattern in names.patterns for name in letters if fnmatchcase(name, pattern)]
    if met:
        raise MappingError(
            f"A template for {met[0][0]} would also be for dead letters, in {met[0][1]}, whose mapping is another.",
            remedy="Give their output a dead_letter_index of another form; or make a component template, and name it in"
            " an index template of your own.",
        )
    return names.common


def columns_by_spark(stream: Stream, output_id: str | None = None) -> dict[str, str | HeadraceError]:
    """The columns that transforms make for the stream's Elasticsearch outputs, or for this one, in Spark's DDL; where
    they are not known, why. Spark is started if there are such transforms."""
    outputs = [
        output.id
        for output in stream.elasticsearch_outputs
        if output_id in (None, output.id) and stream.transform_of(output) is not None
    ]
    if not outputs:
        return {}
    from headrace.connections import export
    from headrace.spark.preview import transformed_columns
    from headrace.spark.sessions import local_session

    export(stream.connection_ids)
    with local_session("headrace mapping", stream.spark.conf) as spark:
        return transformed_columns(spark, stream, outputs)


def print_columns(found: CheckedColumns) -> None:
    """Print what an index makes of an output's documents, as a table."""
    if found.unknown is not None:
        echo(f"unknown output {found.output}, columns: {found.unknown}")
    if not found.fields:
        return
    if found.as_recorded:
        echo(f"The documents of output {found.output} are the records' own JSON: a value may have another form there,")
        echo("and there may be other fields.")
    if not found.exists:
        echo(f"There is no index {found.index} yet. The table has what a new one gets from its templates.")
    print_table(
        ("field", "column", "in JSON", "index has", "index makes", "finding"),
        [
            (
                *(field.path, field.column, field.form, field.index, field.new),
                f"CONFLICT: {field.conflict}" if field.conflict is not None else field.note,
            )
            for field in found.fields
        ],
    )


def _stream(name: str, ledger: str | None) -> Stream:
    """The stream of a definition, or the one that the ledger has by this name."""
    if ":" in name or name.endswith(".json"):
        return defined(name)
    # A transform in the current folder can be imported, as by `headrace streams check`.
    sys.path.insert(0, "")
    with opened(configured_ledger() if ledger is None else ledger) as opened_ledger:
        return registered(opened_ledger, name)
