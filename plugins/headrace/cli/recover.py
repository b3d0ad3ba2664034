"""`headrace streams recover`: rebuilds a lost ledger, or restores lost files from the ledger."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, StreamName
from headrace.cli.output import echo, print_json
from headrace.wal.scan import RecoveryMode

if TYPE_CHECKING:
    from headrace.batch.recovery.recover import Recovered
    from headrace.ledger import Ledger
    from headrace.stream import Stream


@examples("streams recover orders --dry-run", "streams recover orders --storage /srv/headrace")
def recover(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    storage: Annotated[str | None, typer.Option(help="The stream's storage, if the ledger is lost.")] = None,
    definition: Annotated[
        str | None,
        typer.Option(help="The stream's definition in the rebuilt ledger: a JSON file, or module:attribute."),
    ] = None,
    mode: Annotated[RecoveryMode, typer.Option(help="What to do about a damaged log.")] = (
        RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", "--check", help="Only report what would be done.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Recover although a receiver job or a batch may still run; both are fenced.")
    ] = False,
    accept_code: Annotated[
        bool,
        typer.Option(
            "--accept-code", help="Without --definition: use the code that the checkpoint names, without a question."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a stream's lost ledger; or, from the ledger, restore its lost checkpoints, history and manifests."""
    from headrace.batch.recovery.recover import recover as run
    from headrace.stream import Stream
    from headrace.wal.storage import open_storage

    # A definition in the current folder can be imported, as by `headrace streams check`.
    sys.path.insert(0, "")
    given = None if definition is None else Stream.load(definition)
    with _opened(ledger, dry_run=dry_run) as found:
        recovered = run(
            name,
            found,
            open_storage(_storage_url(found, name, storage, given)).below(name),
            definition=given,
            mode=mode,
            dry_run=dry_run,
            force=force,
            accept_code=lambda named: accept_code or _accepts(named),
            progress=lambda what: echo(f"{name}: {what}", err=True),
        )
    if as_json:
        print_json(recovered.as_dict())
    else:
        _report(recovered)


def _accepts(named: Sequence[str]) -> bool:
    """Ask whether the definition of the checkpoint may be used; no, if nobody can answer."""
    if not sys.stdin.isatty():
        return False
    echo("The definition in the checkpoint chooses the code that runs:", err=True)
    for each in named:
        echo(f"  {each}", err=True)
    return typer.confirm("Is all of this the stream's own?", err=True)


@contextmanager
def _opened(url: str, *, dry_run: bool) -> Iterator[Ledger]:
    """The ledger; created if it is lost. A dry run uses a temporary empty ledger in place of a lost one."""
    from headrace.ledger import Ledger
    from headrace.ledger.errors import LedgerMissingError

    if not dry_run:
        with Ledger.open(url) as ledger:
            yield ledger
        return
    try:
        ledger = Ledger.open(url, create=False)
    except LedgerMissingError:
        pass
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
            f"the ledger does not know stream {name!r}: give its storage, or its definition (--definition)",
            param_hint="--storage",
        ) from None
    return Stream.from_json(row.definition).storage.url


def _report(recovered: Recovered) -> None:
    for step, what in recovered.steps.items():
        done = ("Would delete" if recovered.dry_run else "Deleted") if step.endswith("deleted") else None
        echo(f"{done or ('Would write' if recovered.dry_run else 'Wrote')} {what}.")
    if not recovered.steps:
        echo(f"Nothing of stream {recovered.stream} is lost.")
    if recovered.counts:
        echo(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in recovered.counts.items()))
    for notice in recovered.notices:
        echo(f"Note: {notice}")
