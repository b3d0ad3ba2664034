"""The types that describe a block: offset range, handle, receiver id and the block's description for the ledger.

The records themselves are an Arrow record batch with ``headrace.wal.frame.RECORD_SCHEMA``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one incarnation of a topic.

    ``topic_id`` is Kafka's UUID of the topic as text (a topic deleted and created again gets another one);
    ``incarnation`` counts the topic ids that a stream has seen under this name, from 1.
    """

    topic: str
    topic_id: str
    partition: int
    incarnation: int = 1


InputPartition = tuple[str, TopicPartition]
"""An input's id, and a partition that the input reads."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets ``[from_offset, until_offset)`` of one partition; ``records`` of them hold a record.

    ``until_offset`` is the consumer's position after the last record: aborted transactions and compaction
    leave offsets without records, so ``records <= until_offset - from_offset``.
    """

    partition: TopicPartition
    from_offset: int
    until_offset: int
    records: int
    leader_epoch: int | None = None
    """That of the last record, None if it is not known: Kafka gives an offset to another record only in a later one."""

    @property
    def numbers(self) -> list[int]:
        """All but the partition, in the order of the fields; without a leader epoch that is not known. Files and the
        ledger hold a range so."""
        known = [] if self.leader_epoch is None else [self.leader_epoch]
        return [self.from_offset, self.until_offset, self.records, *known]

    def __post_init__(self) -> None:
        if not 0 <= self.from_offset <= self.until_offset:
            raise ValueError(f"offset range [{self.from_offset}, {self.until_offset}) of {self.partition} is no range")
        if not 0 <= self.records <= self.until_offset - self.from_offset:
            raise ValueError(
                f"{self.records} records do not fit [{self.from_offset}, {self.until_offset}) of {self.partition}"
            )


@dataclass(frozen=True, slots=True, order=True)
class BlockHandle:
    """The place of a block's frame: ``length`` bytes at ``offset`` of ``segment`` (a path below the log's root)."""

    segment: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ReceiverId:
    """One receiver of one input of a stream; ``index`` is from 0 to the input's ``receivers`` - 1."""

    stream: str
    input_id: str
    index: int

    def __str__(self) -> str:
        return f"{self.stream}/{self.input_id}/{self.index}"


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """The description of a durable block that is added to the ledger.

    ``epoch`` is the writer's lease epoch; ``sequence`` counts its frames from 0 within the epoch. ``cut_time_ms`` is
    the ledger's time (as the receiver estimates it) when the block was cut. ``event_time_ms`` is a time inside the
    interval of the block's batch time if the stream's batches are by timestamp, None if they are by arrival.
    """

    receiver: ReceiverId
    epoch: int
    sequence: int
    cut_time_ms: int
    handle: BlockHandle
    ranges: tuple[OffsetRange, ...]
    records: int
    payload_bytes: int
    event_time_ms: int | None = None
    source_position: str | None = None
    """Where the receiver's source stands after the block, as JSON; None for Kafka, and in a block from the ledger."""

    @property
    def filled(self) -> list[OffsetRange]:
        """The ranges that have offsets. One without moves no position, and has no place of its own among the ranges."""
        return [r for r in self.ranges if r.until_offset > r.from_offset]
