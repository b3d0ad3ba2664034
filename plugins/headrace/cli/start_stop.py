"""`headrace streams start` and `headrace streams stop`: say whether a stream is to be received."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, OptionalLedgerUrl, StreamName, opened
from headrace.cli.output import echo, print_json

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_NOT_STOPPED = 4
"""Exit code of `stop --wait` when the receiver job still runs at the deadline."""


@examples("streams start orders")
def start(name: StreamName, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Let a stopped stream run again: its waiting receiver DAG starts the receiver job."""
    with opened(ledger) as found:
        found.streams.set_desired_state(name, "running")
    if as_json:
        print_json({"stream": name, "desired_state": "running"})
    else:
        echo(f"Stream {name} is to run; its receiver DAG starts the receiver job.")


@examples("streams stop orders --wait 60", "streams stop orders --storage /srv/headrace --reason 'the ledger is lost'")
def stop(
    name: StreamName,
    *,
    ledger: OptionalLedgerUrl,
    storage: Annotated[
        str | None,
        typer.Option(help="Instead of --ledger, if the ledger is lost: the storage that the definition names."),
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason; it is kept with the job.")] = "headrace streams stop",
    wait: Annotated[float, typer.Option(help="Wait this many seconds for the end of the receiver job.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Stop a stream gracefully: its receivers store what they have read, then end. Batches continue.

    With --storage, for a lost ledger: the receiver job ends if its ledger does not answer, and stores nothing more.
    """
    if storage is not None:
        _stop_without_ledger(name, storage, reason, as_json=as_json)
        return
    if ledger is None:
        raise typer.BadParameter("give it; or, if the ledger is lost, give --storage", param_hint="--ledger")
    with opened(ledger) as found:
        found.streams.set_desired_state(name, "stopped")
        found.jobs.request_stop(name, reason)
        deadline = time.monotonic() + wait
        while running := _runs(found, name):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
    if as_json:
        print_json({"stream": name, "desired_state": "stopped", "running": running})
    else:
        echo(f"Stream {name} is asked to stop." if running else f"Stream {name} is stopped.")
    if running and wait:
        raise typer.Exit(_NOT_STOPPED)


def _stop_without_ledger(name: str, storage: str, reason: str, *, as_json: bool) -> None:
    from headrace.clock import SystemClock
    from headrace.receiver.tracker import write_stop_request
    from headrace.wal.storage import open_storage

    folder = open_storage(storage).below(name)
    if not folder.paths():
        raise typer.BadParameter(f"{folder.url} holds nothing of a stream", param_hint="--storage")
    write_stop_request(folder, reason, requested_ms=SystemClock().now_ms())
    if as_json:
        print_json({"stream": name, "requested_in": folder.url})
    else:
        echo(
            f"A receiver job of stream {name} whose ledger does not answer ends within a minute. One whose ledger "
            "answers goes on: stop that with --ledger."
        )


def _runs(ledger: Ledger, name: str) -> bool:
    from headrace.runs.receiver_job import newest_job

    job = newest_job(ledger, name)
    return job is not None and job.alive(ledger.now_ms())
