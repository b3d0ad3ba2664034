"""Looks whether someone else reads with the stream's consumer group.

headrace assigns partitions itself and commits offsets only for lag tools, so a member that subscribes with the same
group makes those commits fail (and its own offsets are overwritten). It is never part of what headrace stores.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaException

_ANSWER_SECONDS = 10.0


def foreign_members(admin: Any, group: str) -> list[str]:
    """The active members of ``group``, as "client id at host"; a receiver is never one of them.

    Raises KafkaException when Kafka does not answer or the group may not be described.
    """
    # Not by describe_consumer_groups: librdkafka 2.16 ends the process (an assertion in rd_kafka_admin_coord_request)
    # when that question is open while the coordinator goes away. This one asks each broker what it coordinates.
    found = [each for each in admin.list_groups(group, timeout=_ANSWER_SECONDS) if each.id == group]
    for each in found:
        if each.error is not None:
            raise KafkaException(each.error)
    return sorted(f"{member.client_id} at {member.client_host}" for each in found for member in each.members)
