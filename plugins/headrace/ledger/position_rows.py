"""Reads position rows, and tracks how far each partition has come in a stream by timestamp."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, select, update

from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger.codec import partition_key
from headrace.ledger.database import Role
from headrace.ledger.errors import StreamNotFoundError
from headrace.ledger.models import PositionRow, positions, streams
from headrace.ledger.states import PartitionState


class PositionWatermarks(Role):
    """Finds the partitions that a batch by timestamp waits for."""

    def unpassed(self, stream: str, batch_time_ms: int) -> list[PositionRow]:
        """Return the partitions that delay a batch by timestamp, since they may still get records of earlier times.

        A partition has passed the batch time when a stored record has that timestamp or a later one, or when everything
        that Kafka had of it was stored at the batch time plus the stream's allowed lateness, or later. Only active
        partitions delay a batch.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.read() as connection:
            lateness = select(streams.c.allowed_lateness_ms).where(streams.c.name == stream)
            lateness_ms = connection.execute(lateness).scalar_one_or_none()
            if lateness_ms is None:
                raise StreamNotFoundError(stream)
            query = select(positions).where(
                positions.c.stream == stream,
                positions.c.state == PartitionState.ACTIVE,
                positions.c.watermark_ms < batch_time_ms,
                positions.c.drained_ms < batch_time_ms + lateness_ms,
            )
            order = (positions.c.input_id, positions.c.topic, positions.c.incarnation, positions.c.partition)
            return [PositionRow.from_row(row) for row in connection.execute(query.order_by(*order))]


def drain(connection: Connection, receiver_id: ReceiverId, drained: Mapping[TopicPartition, int], now_ms: int) -> None:
    """Note until when partitions are drained. Partitions that the receiver no longer owns are skipped."""
    owner = {"stream": receiver_id.stream, "input_id": receiver_id.input_id, "receiver_index": receiver_id.index}
    connection.execute(
        _DRAIN,
        [
            {
                **{f"key_{name}": value for name, value in (owner | partition_key(partition)).items()},
                "until_ms": min(until_ms, now_ms),
            }
            for partition, until_ms in drained.items()
        ],
    )


_DRAIN = (
    update(positions)
    .where(
        *(
            positions.c[name] == bindparam(f"key_{name}")
            for name in ("stream", "input_id", "receiver_index", "topic", "topic_id", "partition")
        ),
        positions.c.drained_ms < bindparam("until_ms"),
    )
    .values(drained_ms=bindparam("until_ms"))
)
