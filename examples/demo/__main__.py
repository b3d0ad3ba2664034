"""`python -m examples.demo`: runs an example stream on the embedded stack, and proves its result."""

from __future__ import annotations

import json
import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from examples.demo.run import DemoOptions, run_demo
from examples.demo.view import make_view
from rich.console import Console

from headrace.cli.main import errors_as_one_line, single_command

_INTERRUPTED = 130


class Example(StrEnum):
    """The examples that the demo can run."""

    FLIGHTS = "flights"
    WORDCOUNT = "wordcount"


# Records a second. The lines are few, so that a person sees several batches of them.
_RATES = {Example.FLIGHTS: 10_000.0, Example.WORDCOUNT: 10.0}


def demo(
    *,
    example: Annotated[Example, typer.Option(help="Which stream to run.")] = Example.FLIGHTS,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running, and say where and how to log in.")
    ] = False,
    data: Annotated[Path, typer.Option(help="The stack's folder. Each demo deletes the one before it.")] = Path(
        ".headrace/demo"
    ),
    records: Annotated[int | None, typer.Option(min=1, help="Produce only so many flights.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Records produced a second; 0: as fast as it goes. By default 10,000 flights, or 10 lines.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Start Kafka, Elasticsearch and Airflow here, run a stream on them, and prove its result from outside.

    Exit code 0: nothing is lost, doubled or changed. 1: something is, or the demo could not run.
    """
    # SIGTERM stops everything like Ctrl-C, and Ctrl-C works even if a shell started this process in the background.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    rate = _RATES[example] if rate is None else rate
    options = DemoOptions(example=example.value, data=data, keep=keep, records=records, rate=rate or None)
    out, errors = Console(), Console(stderr=True)
    try:
        outcome = run_demo(options, make_view(errors if as_json else out))
    except KeyboardInterrupt:
        errors.print("Interrupted; everything is stopped.")
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), indent=2))
    else:
        outcome.print(out)
    raise typer.Exit(0 if outcome.holds else 1)


if __name__ == "__main__":
    with errors_as_one_line():
        single_command(demo)()
