"""`headrace streams fsck` and `recover`, `headrace ledger migrate`: what is wrong with stored data, and its repair."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, LedgerUrl, StreamName, defined, examples, opened
from headrace.cli.output import echo, print_json
from headrace.errors import HeadraceError
from headrace.wal.scan import RecoveryMode

if TYPE_CHECKING:
    from headrace.batch.recover import Recovered
    from headrace.fsck.findings import Finding, Report
    from headrace.ledger import Ledger
    from headrace.stream import Stream


FOUND = 1
CANNOT_CHECK = 2
_REPORTED = 20
"""The number of findings of one kind that are printed."""


@examples("streams fsck orders", "streams fsck orders --no-kafka --json")
def fsck(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    kafka: Annotated[
        bool, typer.Option(help="Ask Kafka too: log ends, topic ids, and offsets without records.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a stream's ledger against itself, its log, manifests, checkpoints and Kafka. Nothing is changed.

    The stream may run meanwhile. Exit code 0: nothing is wrong, 1: there are findings, 2: it could not be checked.
    """
    from headrace.fsck.stream_check import check_stream

    try:
        with opened(ledger) as opened_ledger:
            report = check_stream(opened_ledger, name, kafka=kafka)
    except HeadraceError as error:
        echo(f"Error: {error}", err=True)
        raise typer.Exit(CANNOT_CHECK) from None
    if as_json:
        print_json({**_report_json(report), "clean": not (report.findings or report.unchecked)})
    else:
        _report_check(report)
    if report.findings:
        raise typer.Exit(FOUND)
    if report.unchecked:
        raise typer.Exit(CANNOT_CHECK)


def _report_json(report: Report) -> dict[str, object]:
    return {
        "stream": report.stream,
        "findings": [
            {
                "problem": finding.problem.value,
                "subject": finding.subject,
                "detail": finding.detail,
                "meaning": finding.meaning,
                "remedy": finding.remedy,
            }
            for finding in report.findings
        ],
        "notes": report.notes,
        "unchecked": report.unchecked,
        "checked": report.checked,
    }


def _report_check(report: Report) -> None:
    by_problem: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_problem.setdefault(finding.problem.value, []).append(finding)
    for problem, findings in by_problem.items():
        echo(f"{problem}: {findings[0].meaning}")
        for finding in findings[:_REPORTED]:
            echo(f"  {finding.subject}: {finding.detail}")
        if len(findings) > _REPORTED:
            echo(f"  and {len(findings) - _REPORTED} more (--json lists them all)")
        echo(f"  What to do: {findings[0].remedy}")
    for note in report.notes:
        echo(f"Note: {note}")
    for what in report.unchecked:
        echo(f"Not checked: {what}")
    looked_at = ", ".join(f"{count:,} {what}" for what, count in report.checked.items())
    verdict = f"{len(report.findings)} findings" if report.findings else "nothing wrong"
    echo(f"Stream {report.stream}: {verdict}, in {looked_at}.")


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
    """Rebuild a stream's lost ledger; or, from the ledger, restore its lost checkpoints, results and manifests."""
    from headrace.batch.recover import recover as run
    from headrace.wal.storage import open_storage

    given = None if definition is None else defined(definition)
    with _opened(ledger, dry_run=dry_run) as opened_ledger:
        recovered = run(
            name,
            opened_ledger,
            open_storage(_storage_url(opened_ledger, name, storage, given)).below(name),
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
        _report_recovered(recovered)


def _accepts(named: Sequence[str]) -> bool:
    """Ask whether the definition of the checkpoint may be used. False without a terminal."""
    if not sys.stdin.isatty():
        return False
    echo("The definition in the checkpoint chooses the code that runs:", err=True)
    for reference in named:
        echo(f"  {reference}", err=True)
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


def _report_recovered(recovered: Recovered) -> None:
    for step, what in recovered.steps.items():
        done = ("Would delete" if recovered.dry_run else "Deleted") if step.endswith("deleted") else None
        echo(f"{done or ('Would write' if recovered.dry_run else 'Wrote')} {what}.")
    if not recovered.steps:
        echo(f"Nothing of stream {recovered.stream} is lost.")
    if recovered.counts:
        echo(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in recovered.counts.items()))
    for notice in recovered.notices:
        echo(f"Note: {notice}")


@examples("ledger migrate --ledger sqlite:////srv/orders/ledger.db")
def migrate(*, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Migrate a ledger to this version's schema, or create a new one. First stop what an older headrace runs on it.

    A ledger that has this schema is not changed. The migration is one transaction: either all of it is done or nothing.
    """
    from headrace.ledger import Ledger

    done = Ledger.migrate(ledger)
    if as_json:
        print_json({"ledger": ledger, **dataclasses.asdict(done)})
    elif done.before == done.after:
        echo(f"The ledger's schema is {done.after} already.")
    elif done.before is None:
        echo(f"Made a ledger of schema {done.after}.")
    else:
        echo(f"Migrated the ledger from schema {done.before} to {done.after}.")
