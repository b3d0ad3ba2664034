"""A stream as a lost ledger had it, found in the log, the manifests, the checkpoints and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.blocks import BlockInfo, ReceiverId
from headrace.ledger.rows import (
    BatchInputRow,
    BatchRow,
    FiledReplay,
    GapRow,
    PositionRow,
    ReplayDefinitionRow,
    StreamRevision,
    StreamRow,
    TopicRow,
)


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment of the log, of so many bytes. Its writer is gone: it is closed."""

    path: str
    receiver_id: ReceiverId
    epoch: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block of the log that counts, and its batch time."""

    info: BlockInfo
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch as it is to be. ``outputs`` are the counts of those that were recorded, by id, and ``revisions`` those of
    the definitions that wrote them, as far as they are known.

    ``history`` is the number of the file that holds it as it is, 0 if none does.
    """

    row: BatchRow
    inputs: tuple[BatchInputRow, ...] = ()
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replays: tuple[FiledReplay, ...] = ()
    history: int = 0
    revisions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream as it is to be. Blocks are in the order in which they are to be added: ascending along each partition,
    and those of a batch as in its manifest.

    ``stream.job_epoch`` and ``receiver_epochs`` are at least the highest that a writer of the lost ledger can have had:
    the next ones are above them, so that no segment's name comes again and old writers stay fenced. So is
    ``last_attempt`` above the number of every attempt at a batch: outputs and states refuse lower ones than they know.
    ``revisions`` are the definitions that are known, that of ``stream`` among them.
    ``runs`` are the batch times that runs were given. ``found_gaps`` are those that nobody had recorded: lost with a
    part of the log.
    """

    stream: StreamRow
    revisions: Sequence[StreamRevision]
    receiver_epochs: Mapping[ReceiverId, int]
    last_attempt: int
    topics: Sequence[TopicRow] = ()
    positions: Sequence[PositionRow] = ()
    segments: Sequence[FoundSegment] = ()
    blocks: Sequence[FoundBlock] = ()
    batches: Sequence[FoundBatch] = ()
    replay_definitions: Sequence[ReplayDefinitionRow] = ()
    gaps: Sequence[GapRow] = ()
    found_gaps: Sequence[GapRow] = ()
    runs: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
