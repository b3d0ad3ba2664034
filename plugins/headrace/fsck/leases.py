"""Checks who may write: the receiver job, its receivers, and the topics and partitions that they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import PartitionState


def check_jobs(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that only the newest job runs, and that receivers run only in it."""
    stream = snapshot.stream
    for job in snapshot.jobs:
        name = f"receiver job {job.epoch}"
        if job.epoch > stream.job_epoch:
            yield Finding(Problem.LEASE_WRONG, name, f"The stream's newest job is said to be {stream.job_epoch}.")
        elif job.epoch < stream.job_epoch and not job.state.ended:
            what = f"It is {job.state.value}, held by {job.holder}, and job {stream.job_epoch} has begun since."
            yield Finding(Problem.LEASE_WRONG, name, what)
    current = next((job for job in snapshot.jobs if job.epoch == stream.job_epoch), None)
    for receiver in snapshot.receivers:
        name = f"receiver {receiver.receiver_id}"
        if receiver.job_epoch > stream.job_epoch:
            what = f"It is of job {receiver.job_epoch}, and the newest is {stream.job_epoch}."
            yield Finding(Problem.LEASE_WRONG, name, what)
        elif not receiver.state.ended and (
            receiver.job_epoch < stream.job_epoch or current is None or current.state.ended
        ):
            what = f"It is {receiver.state.value}, and its job {receiver.job_epoch} has ended."
            yield Finding(Problem.LEASE_WRONG, name, what)


def check_topics(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that each topic has one current incarnation, and that no partition of another incarnation is being read."""
    current: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = {}
    for row in snapshot.topics:
        known[row.input_id, row.topic, row.topic_id] = row
        current[row.input_id, row.topic] += [row.topic_id] if row.current else []
    for (input_id, topic), ids in sorted(current.items()):
        if len(ids) != 1:
            what = f"{len(ids)} of its incarnations are marked as the current one."
            yield Finding(Problem.TOPIC_WRONG, f"{input_id}/{topic}", what)
    for position in snapshot.positions:
        tp = position.partition
        name = partition_text((position.input_id, tp))
        found = known.get((position.input_id, tp.topic, tp.topic_id))
        if found is None or found.incarnation != tp.incarnation or tp.partition >= found.partitions:
            what = "Its topic is not known so: " + (
                "not at all." if found is None else f"incarnation {found.incarnation}, {found.partitions} partitions."
            )
            yield Finding(Problem.TOPIC_WRONG, name, what)
        elif position.state is PartitionState.ACTIVE and not found.current and position.receiver_index is not None:
            what = f"It is read by receiver {position.receiver_index}, and another topic has its name since."
            yield Finding(Problem.TOPIC_WRONG, name, what)
