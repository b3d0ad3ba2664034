"""Checks whether another client reads with the stream's consumer group.

headrace assigns partitions itself and commits offsets only for lag tools. A member that subscribes with the same group
makes those commits fail, and its own offsets are overwritten. What headrace stores does not depend on it.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaException

_ANSWER_SECONDS = 10.0


def foreign_members(admin: Any, group: str) -> list[str]:
    """Return the active members of ``group``, as "client id at host"; a receiver is never one of them.

    Raises KafkaException when Kafka does not answer or the group may not be described.
    """
    # Not describe_consumer_groups: if the coordinator goes away during that request, librdkafka 2.16 ends the process
    # (an assertion in rd_kafka_admin_coord_request). list_groups asks each broker for the groups that it coordinates.
    found = [each for each in admin.list_groups(group, timeout=_ANSWER_SECONDS) if each.id == group]
    for each in found:
        if each.error is not None:
            raise KafkaException(each.error)
    return sorted(f"{member.client_id} at {member.client_host}" for each in found for member in each.members)
