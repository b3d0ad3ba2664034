"""The data for rebuilding a lost ledger: a stream as found in the log, manifests, checkpoints and history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.ledger.batch_tables import BatchRow, FiledReplay, ReplayDefinitionRow
from headrace.ledger.receiving_tables import PositionRow, TopicRow
from headrace.ledger.tables import GapRow, StreamRevision, StreamRow


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment of the log and its size. Its writer is gone, so it is closed."""

    path: str
    receiver_id: ReceiverId
    epoch: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """An accepted block of the log, and its batch time."""

    info: BlockInfo
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class FoundInput:
    """A batch's input from one partition, as in `BatchInputRow`, which takes 20 times the memory."""

    input_id: str
    partition: TopicPartition
    from_offset: int
    until_offset: int
    records: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch to be restored. ``outputs`` has the counts of the recorded outputs, by id; ``revisions`` the revisions of
    the definitions that wrote them, as far as they are known.

    ``history`` is the number of the history file that holds the batch in this state, 0 if none does.
    """

    row: BatchRow
    inputs: tuple[FoundInput, ...] = ()
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replays: tuple[FiledReplay, ...] = ()
    history: int = 0
    revisions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream to be restored. Blocks are in the order in which they are to be added: ascending in each partition, and
    the blocks of a batch in the order of its manifest.

    ``stream.job_epoch`` and ``receiver_epochs`` are at least the highest that a writer of the lost ledger can have had:
    new epochs are above them, so that no segment's name is used again and old writers stay fenced.
    ``last_attempt`` is above the number of every attempt at a batch: outputs and states refuse lower numbers than they
    know. ``revisions`` are the known definitions, including that of ``stream``.
    ``runs`` are the batch times assigned to runs. ``found_gaps`` are gaps that were not recorded: they were lost with a
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
