"""`headrace recover`: rebuild a lost ledger from the stream's folder, or that folder's lost files from the ledger."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, LedgerUrl, StreamName
from headrace.cli.output import print_json

if TYPE_CHECKING:
    from headrace.batch.recovery.recover import Recovered
    from headrace.ledger import Ledger
    from headrace.stream import Stream

_MODES = "kTolerateCorruptedTailRecords, kAbsoluteConsistency, kPointInTimeRecovery or kSkipAnyCorruptedRecords"


def recover(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    storage: Annotated[str | None, typer.Option(help="The stream's storage, if the ledger is lost.")] = None,
    definition: Annotated[
        str | None, typer.Option(help="A JSON file, or module:attribute of a Stream: if no checkpoint has it.")
    ] = None,
    mode: Annotated[str, typer.Option(help=f"What to do about a damaged log: {_MODES}.")] = (
        "kTolerateCorruptedTailRecords"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", "--check", help="Say what would be done, only.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if a receiver job or a batch could still live: both are fenced.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a stream's lost ledger; or, from the ledger, restore its lost checkpoints, history and manifests."""
    from headrace.batch.recovery.recover import recover as run
    from headrace.stream import Stream
    from headrace.wal.scan import RecoveryMode
    from headrace.wal.storage import open_storage

    given = None if definition is None else Stream.load(definition)
    try:
        recovery_mode = RecoveryMode(mode)
    except ValueError:
        raise typer.BadParameter(f"{mode!r} is none of {_MODES}.") from None
    with _opened(ledger, dry_run=dry_run) as found:
        recovered = run(
            name,
            found,
            open_storage(_storage_url(found, name, storage, given)).below(name),
            definition=given,
            mode=recovery_mode,
            dry_run=dry_run,
            force=force,
            progress=lambda what: typer.echo(f"{name}: {what}", err=True),
        )
    if as_json:
        print_json(recovered.as_dict())
    else:
        _report(recovered)


@contextmanager
def _opened(url: str, *, dry_run: bool) -> Iterator[Ledger]:
    """The ledger; created if it is lost. A dry run uses a temporary empty ledger in place of a lost one."""
    from headrace.ledger import Ledger
    from headrace.ledger.errors import LedgerUnavailableError, SchemaError

    if not dry_run:
        with Ledger.open(url) as ledger:
            yield ledger
        return
    try:
        ledger = Ledger.open(url, create=False)
    except (LedgerUnavailableError, SchemaError) as error:
        if "no ledger at" not in str(error) and "is empty" not in str(error):
            raise
    else:
        with ledger:
            yield ledger
        return
    with tempfile.TemporaryDirectory() as folder, Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        yield ledger


def _storage_url(ledger: Ledger, name: str, storage: str | None, definition: Stream | None) -> str:
    from headrace.ledger.errors import StreamNotFoundError
    from headrace.stream import Stream

    if storage is not None:
        return storage
    if definition is not None:
        return definition.storage.url
    try:
        row = ledger.streams.get(name)
    except StreamNotFoundError:
        raise typer.BadParameter(
            f"The ledger does not know stream {name!r}: say where its folder is (--storage), or how it is defined "
            "(--definition)."
        ) from None
    return Stream.from_json(row.definition).storage.url


def _report(recovered: Recovered) -> None:
    for step, what in recovered.steps.items():
        done = ("Would delete" if recovered.dry_run else "Deleted") if step.endswith("deleted") else None
        typer.echo(f"{done or ('Would write' if recovered.dry_run else 'Wrote')} {what}.")
    if not recovered.steps:
        typer.echo(f"Nothing of stream {recovered.stream} is lost.")
    if recovered.counts:
        typer.echo(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in recovered.counts.items()))
    for notice in recovered.notices:
        typer.echo(f"Note: {notice}")
