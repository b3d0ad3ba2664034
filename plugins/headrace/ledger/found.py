"""What a rebuild found of a lost ledger, in the log, the manifests and the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.ledger.rows import BatchInputRow


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment of the log. Its writer is gone: it is closed."""

    path: str
    receiver_id: ReceiverId
    epoch: int


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block of the log that counts, and its batch time: its manifest's, or a later one of the finder's choice."""

    info: BlockInfo
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch by its manifest. ``inputs`` are needed where its blocks are no longer in the log, else summed up.

    ``blocks`` is how many it took; without it they are counted as far as they are known. ``manifest_uri`` is the
    checkpoint's where a time has several manifests: an allocation that was overtaken may have left one.

    With ``checkpoint_uri`` it has completed; with ``abandoned``, a reason, it was given up. ``outputs`` are the counts
    of those that were recorded, by id; a completed batch without any has had all of the stream's. ``built``: it has
    inputs and never had blocks.
    """

    batch_time_ms: int
    manifest_uri: str
    manifest_sha256: str
    absorbed: tuple[int, ...] = ()
    inputs: tuple[BatchInputRow, ...] = ()
    checkpoint_uri: str | None = None
    completed_at_ms: int | None = None
    abandoned: str | None = None
    code_version: str | None = None
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    late_records: int | None = None
    built: bool = False
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class FoundStream:
    """What was found of a stream. Blocks are ascending along each partition.

    ``positions`` are next offsets by input and partition. In the same form ``starting_offsets`` are those at which the
    stream began to receive, without one the lowest offset found that it received; and ``watermarks`` the latest
    timestamps, where they are not those of blocks. ``zero_time_ms`` is the last batch time before the stream began,
    without it one before every batch found that it received. Starting offsets and zero time are in the checkpoint, and
    bound what may be built from Kafka: what was received never is.

    ``runs`` are the batch times that runs were given. ``job_epoch`` and ``receiver_epochs`` are the highest seen: the
    next ones are above them, so that no segment's name comes again and old writers stay fenced.
    """

    job_epoch: int
    receiver_epochs: Mapping[ReceiverId, int]
    positions: Mapping[tuple[str, TopicPartition], int]
    segments: Sequence[FoundSegment] = ()
    blocks: Sequence[FoundBlock] = ()
    batches: Sequence[FoundBatch] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    watermarks: Mapping[tuple[str, TopicPartition], int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    starting_offsets: Mapping[tuple[str, TopicPartition], int] = field(default_factory=dict)
    zero_time_ms: int | None = None
