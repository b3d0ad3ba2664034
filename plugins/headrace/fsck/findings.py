"""The problems that a check can find, with the meaning and the remedy of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.ledger.snapshots import StreamSnapshot


class Problem(StrEnum):
    """A rule that does not hold. The value is what scripts see."""

    OFFSETS_MISSING = "offsets_missing"
    OFFSETS_TWICE = "offsets_twice"
    POSITION_WRONG = "position_wrong"
    CLOCK_WAS_AHEAD = "clock_was_ahead"
    BATCH_STATE_WRONG = "batch_state_wrong"
    REPLAY_STATE_WRONG = "replay_state_wrong"
    CLEANED_TOO_EARLY = "cleaned_too_early"
    OUT_OF_TURN = "out_of_turn"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_DAMAGED = "manifest_damaged"
    MANIFEST_DIFFERS = "manifest_differs"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_RETURNED = "segment_returned"
    BLOCK_UNREADABLE = "block_unreadable"
    BLOCK_DIFFERS = "block_differs"
    BLOCK_UNKNOWN = "block_unknown"
    LOG_DAMAGED = "log_damaged"
    CHECKPOINT_UNREADABLE = "checkpoint_unreadable"
    RESULT_UNREADABLE = "result_unreadable"
    LEDGER_SET_BACK = "ledger_set_back"
    KAFKA_TOPIC_REPLACED = "kafka_topic_replaced"
    KAFKA_RECORDS_GONE = "kafka_records_gone"
    KAFKA_LOG_CUT = "kafka_log_cut"
    COMMITTED_TOO_FAR = "committed_too_far"


_REBUILD = (
    "Something other than headrace changed the ledger, or headrace has a fault. Stop the stream, and keep a copy of "
    "the ledger as it is. Name a new ledger and rebuild it with `headrace streams recover`. Report it with this output."
)
_SET_BACK = (
    "Stop the stream and do not start it on this ledger: restore the newer one, or rebuild it with "
    "`headrace streams recover`."
)
_RESTORE_SEGMENT = (
    "For a batch that has not completed: restore the segment's file from a copy, then run the batch. Without a copy, "
    "abandon the batch: `headrace batches abandon`. A completed batch has lost nothing, but can only be run again from "
    "Kafka."
)

MEANINGS: dict[Problem, tuple[str, str]] = {
    Problem.OFFSETS_MISSING: (
        "Kafka has records that were skipped: they are not in any block, batch or recorded gap.",
        "Keep a copy of the ledger. Read the offsets again with a stream of another name that starts at them.",
    ),
    Problem.OFFSETS_TWICE: ("Records were received twice: they are in two batches.", _REBUILD),
    Problem.POSITION_WRONG: (
        "Receiving would not continue where the stored records end: records would be missed or received twice.",
        _REBUILD,
    ),
    Problem.CLOCK_WAS_AHEAD: (
        "Records wait for a batch time that is still to come: the ledger's clock was ahead.",
        "Nothing is lost. Blocks without a batch move back by themselves at the next batch run, or when the receiver "
        "job starts. If a batch was allocated for a later time, records wait until that time. Keep the clock of the "
        "ledger's database synchronized.",
    ),
    Problem.BATCH_STATE_WRONG: (
        "The batch's state does not agree with its outputs.",
        "Run the batch again: clear its run.",
    ),
    Problem.REPLAY_STATE_WRONG: (
        "The replay's state does not agree with its outputs.",
        "Run the replay's batch again.",
    ),
    Problem.CLEANED_TOO_EARLY: (
        "The log no longer has the records of an unfinished batch: only Kafka may still have them.",
        "Run the batch soon, while Kafka has its records.",
    ),
    Problem.OUT_OF_TURN: (
        "A later batch ran before an earlier one, although the order counts: state or windows may be wrong.",
        "Run the earlier batch, then the later ones again, in order.",
    ),
    Problem.MANIFEST_MISSING: (
        "The batch cannot be run again: only this file lists its blocks.",
        "Clear the task allocate_blocks of the batch's run: it writes the same manifest again while the ledger has "
        "the batch's blocks. "
        "Else restore the file from a copy.",
    ),
    Problem.MANIFEST_DAMAGED: (
        "The batch cannot be run again: the file is not the one by which it was allocated.",
        "Clear the task allocate_blocks of the batch's run: it writes the same manifest again while the ledger has "
        "the batch's blocks. "
        "Else restore the file from a copy.",
    ),
    Problem.MANIFEST_DIFFERS: (
        "The file is the one that the ledger names, and it lists other blocks or ranges than the ledger.",
        _REBUILD,
    ),
    Problem.SEGMENT_MISSING: ("A log segment that is still needed is missing.", _RESTORE_SEGMENT),
    Problem.SEGMENT_RETURNED: (
        "A log segment that cleanup had deleted exists again. Nothing reads it.",
        "Delete it; most likely it came from a copy of the folder.",
    ),
    Problem.BLOCK_UNREADABLE: ("The records of this block cannot be read from the log.", _RESTORE_SEGMENT),
    Problem.BLOCK_DIFFERS: ("The log holds a different block here than the ledger says.", _SET_BACK),
    Problem.BLOCK_UNKNOWN: (
        "The log proves that this block was accepted, and the ledger does not know it: the ledger was lost or set back "
        "to an older copy. If its records are received again, a batch may hold them twice.",
        _SET_BACK,
    ),
    Problem.LOG_DAMAGED: (
        "The log is damaged at a place where the ledger knows of no block.",
        "Check the disk. A ledger that is lost could be rebuilt less completely from this log.",
    ),
    Problem.CHECKPOINT_UNREADABLE: (
        "A lost ledger could not be rebuilt completely.",
        "The next completed batch writes a checkpoint; or write one from the ledger with `headrace streams recover`.",
    ),
    Problem.RESULT_UNREADABLE: (
        "The batch's result file is missing or damaged: after a rebuild of the ledger the batch would be run again.",
        "Write it again from the ledger with `headrace streams recover`.",
    ),
    Problem.LEDGER_SET_BACK: (
        "A checkpoint or a result is newer than the ledger, which was restored from an older copy: records would be "
        "received again, with offsets and batch times that were already used.",
        _SET_BACK,
    ),
    Problem.KAFKA_TOPIC_REPLACED: (
        "The topic was deleted and created again, and the stream has not seen it yet: records of the old one that "
        "were not received are lost.",
        "Let the receiver job run: it detects the new topic and reads it from its first offset.",
    ),
    Problem.KAFKA_RECORDS_GONE: (
        "Kafka has deleted records before they were received.",
        'Run the receiver job: with on_lost_offsets="reset" it records the gap and continues, with "fail" it reports '
        "the error. Increase the topic's retention.",
    ),
    Problem.KAFKA_LOG_CUT: (
        "Kafka's log ends before the stored position: Kafka lost records that it had delivered (by an unclean leader "
        "election, or lost files), and new records take their offsets.",
        "Compare the topic with the stream's records; then create the topic again, or read it with a stream of another "
        "name.",
    ),
    Problem.COMMITTED_TOO_FAR: (
        "The group's committed offset is beyond the stored position. headrace commits after storing, so another "
        "consumer commits in its group, or the ledger was set back.",
        "Give the input its own group, and compare the ledger with the newest checkpoint.",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A violated rule about ``subject`` (a batch time, a partition, a file ...). ``detail`` says what is wrong."""

    problem: Problem
    subject: str
    detail: str

    @property
    def meaning(self) -> str:
        """The consequence of the problem."""
        return MEANINGS[self.problem][0]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return MEANINGS[self.problem][1]

    @property
    def key(self) -> tuple[Problem, str]:
        """Two findings with the same key are the same finding."""
        return self.problem, self.subject


@dataclass
class Report:
    """The result of a check. ``notes`` are open questions, ``unchecked`` what could not be read, ``checked`` counts."""

    stream: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)


Judgement = Callable[[StreamSnapshot], Iterable[Finding]]
"""Compares an observation of the log, of files or of Kafka with a snapshot of the ledger.

An observation is made between two snapshots, and is reported only if both give the finding. While a stream runs, the
first snapshot is older than the observation and the second is newer, so one snapshot alone gives false alarms.
"""


def confirmed(before: Iterable[Finding], after: Iterable[Finding]) -> list[Finding]:
    """The findings that are in both, in the wording of ``after``."""
    known = {finding.key for finding in before}
    return [finding for finding in after if finding.key in known]
