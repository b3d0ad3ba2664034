"""Runs all checks of a stream, in an order that avoids false alarms while the stream runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from headrace.batch.manifest import LOG_FOLDER
from headrace.fsck.coverage import Hole, check_coverage
from headrace.fsck.findings import Finding, Judgement, Problem, Report, confirmed
from headrace.fsck.kafka import observe_kafka
from headrace.fsck.ledger import check_built, check_cleaned, check_clock, check_replays, check_states, check_turns
from headrace.fsck.log import observe_checkpoints, observe_log, observe_manifests
from headrace.ledger import Ledger
from headrace.ledger.snapshots import StreamSnapshot
from headrace.stream import Stream
from headrace.wal.errors import StorageError
from headrace.wal.storage import open_storage

_OF_THE_LEDGER = (check_clock, check_cleaned, check_built, check_states, check_turns, check_replays)


def check_stream(ledger: Ledger, name: str, *, kafka: bool = True) -> Report:
    """Run all checks of a stream; changes nothing.

    The ledger is read in one transaction, so its rows are compared as of one moment. Files and Kafka are read after
    that. If they seem to contradict the ledger, the ledger is read again, and only findings that still hold are
    reported.

    Args:
        kafka: ask Kafka too. Without it, offsets without records cannot be distinguished from skipped records.

    Raises:
        StreamNotFoundError: there is no such stream.
        LedgerError: the ledger cannot be read.
        StreamDefinitionError: the stream's definition in the ledger cannot be read.
    """
    snapshot = ledger.snapshots.take(name)
    stream = Stream.from_json(snapshot.stream.definition)
    report = Report(name)
    covered, holes = check_coverage(snapshot)
    report.findings = [*covered, *check_ledger(snapshot)]
    report.checked = {
        "blocks": len(snapshot.blocks),
        "batches": len(snapshot.batches),
        "partitions": len(snapshot.positions),
        "segments": sum(row.removed_at_ms is None for row in snapshot.segments),
    }
    judgements = _observe_files(stream, snapshot, report)
    if kafka:
        seen = observe_kafka(stream, snapshot, holes)
        report.notes += seen.notes
        report.unchecked += seen.unchecked
        judgements.append(seen.judge)
    elif holes:
        report.notes += _unexplained(holes)
    suspects = [finding for judge in judgements for finding in judge(snapshot)]
    if suspects:
        after = ledger.snapshots.take(name)
        findings = confirmed(suspects, chain.from_iterable(judge(after) for judge in judgements))
        if stream.delivery != "exactly_once":
            findings = _without_vanished(findings, stream, report)
        report.findings += findings
    return report


def _without_vanished(findings: list[Finding], stream: Stream, report: Report) -> list[Finding]:
    """The findings without unreadable blocks, which the stream's delivery allows: they become notes."""
    instead = "batches read it from Kafka" if stream.delivery == "at_least_once" else "batches leave it out"
    allowed = [finding for finding in findings if finding.problem is Problem.BLOCK_UNREADABLE]
    report.notes += [
        f"{finding.subject}: {finding.detail} With delivery {stream.delivery}, {instead}." for finding in allowed
    ]
    return [finding for finding in findings if finding not in allowed]


def check_ledger(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """The checks that compare the ledger's rows with each other."""
    for check in _OF_THE_LEDGER:
        yield from check(snapshot)


def _observe_files(stream: Stream, snapshot: StreamSnapshot, report: Report) -> list[Judgement]:
    judgements: list[Judgement] = []
    try:
        folder = open_storage(stream.folder_url)
        log = observe_log(folder.below(LOG_FOLDER), snapshot)
        judgements.append(log.judge)
        report.checked["frames"] = log.frames
        manifests = observe_manifests(snapshot)
        judgements.append(manifests.judge)
        report.checked["manifests"] = manifests.files
        judgements.append(observe_checkpoints(folder, snapshot).judge)
    except (StorageError, OSError) as error:
        report.unchecked.append(f"The storage {stream.storage.url}: {error}")
    return judgements


def _unexplained(holes: list[Hole]) -> list[str]:
    offsets = sum(hole.until - hole.start for hole in holes)
    return [
        f"{len(holes)} ranges of {offsets} offsets are in no block, batch or gap. If transactions or "
        f"compaction left them, they hold no record; only Kafka can show that (--kafka). The first is {holes[0]}."
    ]
