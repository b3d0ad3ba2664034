"""Looks whether someone else reads with the stream's consumer group.

headrace assigns partitions itself and commits offsets only for lag tools, so a member that subscribes with the same
group makes those commits fail (and its own offsets are overwritten). It is never part of what headrace stores.
"""

from __future__ import annotations

from typing import Any

_ANSWER_SECONDS = 10.0


def foreign_members(admin: Any, group: str) -> list[str]:
    """The active members of ``group``, as "client id at host"; a receiver is never one of them.

    Raises KafkaException when Kafka does not answer or the group may not be described.
    """
    futures = admin.describe_consumer_groups([group], request_timeout=_ANSWER_SECONDS)
    described = futures[group].result(timeout=_ANSWER_SECONDS + 5)
    return sorted(f"{member.client_id} at {member.host}" for member in described.members)
