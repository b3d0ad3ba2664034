"""`headrace streams check`: check a stream's definition, and whether what it needs answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands import examples
from headrace.cli.options import AsJson
from headrace.cli.output import echo, print_json

if TYPE_CHECKING:
    from headrace.stream import Stream


@examples("streams check pipelines.orders:stream", "streams check orders.json --connect")
def check(
    definition: Annotated[str, typer.Argument(help="A JSON file, or module:attribute of a Stream.")],
    *,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect", help="Also check that ledger, storage, Kafka, its topics and each output's server answer."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a stream's definition, transforms and receivers; prints the reason and exits with 1 if it cannot run.

    With --connect, also checks its ledger, storage, Kafka topics and outputs. Connections come from AIRFLOW_CONN_...
    variables.
    """
    from headrace.kafka.client import check_client_settings
    from headrace.listeners.loading import check_listeners
    from headrace.receiver.receiver import check_receiver_classes
    from headrace.spark.transforms import add_py_files, check_transform
    from headrace.stream import Stream

    sys.path.insert(0, "")
    stream = Stream.load(definition)
    check_client_settings(stream)
    add_py_files(stream)
    check_transform(stream)
    check_receiver_classes(stream)
    check_listeners(stream)
    if connect:
        _check_connections(stream, as_json=as_json)
    elif as_json:
        typer.echo(stream.to_json())
    else:
        echo(f"Stream {stream.name} can run.")


def _check_connections(stream: Stream, *, as_json: bool) -> None:
    from headrace.fsck.connecting import check_connections

    found = []
    for each in check_connections(stream):
        found.append(each)
        if not as_json:
            echo(f"{'ok    ' if each.error is None else 'FAILED'} {each}")
    failed = [each for each in found if each.error is not None]
    if as_json:
        print_json({"stream": stream.name, "ok": not failed, "checks": found})
    else:
        wrong = f"{len(failed)} of {len(found)} checks failed" if failed else "can run, and all that it needs answers"
        echo(f"Stream {stream.name}: {wrong}.")
    if failed:
        raise typer.Exit(1)
