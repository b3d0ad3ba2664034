"""`headrace from-connect`: prints the definition of a stream that does what a connector of Kafka Connect did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, examples
from headrace.cli.output import echo, print_json
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.kafka_connect.definition import Definition


class ConnectorFileError(HeadraceError):
    """A file of the connector cannot be read, or one of the definition is there already."""


@examples(
    "from-connect connector.json",
    "from-connect connector.properties --worker connect-distributed.properties --to dags",
    "from-connect connector.json --topics orders,returns",
)
def from_connect(
    connector: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The connector's file, as JSON or as properties; - is standard input."),
    ],
    *,
    worker: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The worker's file: its converters and consumer settings count where the connector has none.",
        ),
    ] = None,
    topics: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="The topics that topics.regex finds, with commas: where an index or ids depend on their names.",
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the definition, and the transform module if it needs one, here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the definition of a stream that does what a connector of Kafka Connect did, and say so of each property.

    Knows the sinks of Confluent and of Aiven for Elasticsearch and OpenSearch. Exits with 1 if properties are left that
    the definition does not do: it names them, and does not load before a person has decided about each.
    """
    from headrace.kafka_connect.connector import read_connector
    from headrace.kafka_connect.definition import define

    name = "connector" if connector == "-" else Path(connector).stem
    read = read_connector(_text(connector), name=name, worker="" if worker is None else _text(str(worker)))
    definition = define(read, topics=[topic.strip() for topic in topics.split(",") if topic.strip()])
    if to is not None:
        _write(definition, to)
    if as_json:
        _print(definition)
    elif to is None:
        echo(definition.text)
        if definition.transform is not None:
            echo(f"# The end of the file. What follows is another one, {definition.transform_module}.py:")
            echo(definition.transform)
    left = definition.to_decide
    for each in left:
        echo(f"To decide: {each}", err=True)
    echo(f"{len(definition.properties)} properties, {len(left)} of them to decide.", err=True)
    if left:
        raise typer.Exit(1)


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConnectorFileError(
            f"{path} cannot be read: {why}.", remedy="Name a text file, or - for standard input."
        ) from None


def _write(definition: Definition, folder: Path) -> None:
    files = {folder / f"{definition.module}.py": definition.text}
    if definition.transform is not None:
        files[folder / f"{definition.transform_module}.py"] = definition.transform
    for path in files:
        if path.exists():
            raise ConnectorFileError(f"{path} is there already.", remedy="Name another folder, or move the file away.")
    for path, text in files.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConnectorFileError(
                f"{path} cannot be written: {error.strerror}.", remedy="Name another folder."
            ) from None
        echo(f"Written: {path}", err=True)


def _print(definition: Definition) -> None:
    print_json(
        {
            "name": definition.name,
            "definition": definition.text,
            "transform": definition.transform,
            "properties": [
                {
                    "name": each.name,
                    "value": each.value,
                    "kind": each.answer.kind,
                    "answer": str(each.answer),
                    "to_decide": each.answer.is_open,
                }
                for each in definition.properties
            ],
        }
    )
