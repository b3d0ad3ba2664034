"""`headrace streams fsck`: check a stream's ledger, log, manifests, checkpoints and Kafka against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, StreamName, opened
from headrace.cli.output import echo, print_json
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.fsck.findings import Finding, Report

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
        with opened(ledger) as found:
            report = check_stream(found, name, kafka=kafka)
    except HeadraceError as error:
        echo(f"Error: {error}", err=True)
        raise typer.Exit(CANNOT_CHECK) from None
    if as_json:
        print_json({**_plain(report), "clean": not (report.findings or report.unchecked)})
    else:
        _report(report)
    if report.findings:
        raise typer.Exit(FOUND)
    if report.unchecked:
        raise typer.Exit(CANNOT_CHECK)


def _plain(report: Report) -> dict[str, object]:
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


def _report(report: Report) -> None:
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
