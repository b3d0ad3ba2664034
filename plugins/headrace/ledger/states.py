"""The states of the ledger's rows, in the order in which rows go through them, and the kinds of events."""

from __future__ import annotations

from enum import StrEnum

STATE_STEP = "state"
"""The step that a batch's outputs wait for if the stream has state (`headrace.stream.state.STATE_STEP`)."""


class DesiredState(StrEnum):
    """The state of a stream that a person asked for."""

    RUNNING = "running"
    STOPPED = "stopped"


class JobState(StrEnum):
    """The states of a receiver job. The last two are final; a new job has a new epoch."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (JobState.STOPPED, JobState.FAILED)


class ReceiverState(StrEnum):
    """The states of a receiver. ``scheduled``: the tracker has placed it, and its task has not registered yet. The last
    three are ends: by itself, with an error, or because its job ended."""

    SCHEDULED = "scheduled"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in (ReceiverState.STOPPED, ReceiverState.FAILED, ReceiverState.LOST)


class PartitionState(StrEnum):
    """The states of a partition: read, stopped by an error, or ended (its topic was deleted or created again)."""

    ACTIVE = "active"
    FAILED = "failed"
    ENDED = "ended"


class BatchState(StrEnum):
    """The states of a batch. ``abandoned`` and ``absorbed`` (into a later batch, by coalescing) are final."""

    ALLOCATED = "allocated"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    ABSORBED = "absorbed"


UNFINISHED = (BatchState.ALLOCATED, BatchState.RUNNING, BatchState.FAILED)
"""The states of a batch that is to be run."""


class AttemptState(StrEnum):
    """The states of an attempt, or of one of its outputs. ``fenced``: a later attempt took an output from it."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    FENCED = "fenced"


class EventKind(StrEnum):
    """The kinds of a stream's events."""

    STREAM_REGISTERED = "stream_registered"
    DEFINITION_NOT_ADOPTED = "definition_not_adopted"
    STREAM_STATE_CHANGED = "stream_state_changed"
    JOB_STARTED = "job_started"
    JOB_STATE_CHANGED = "job_state_changed"
    JOB_STOP_REQUESTED = "job_stop_requested"
    JOB_STOPPED = "job_stopped"
    JOB_FAILED = "job_failed"
    RECEIVER_STARTED = "receiver_started"
    RECEIVER_REFUSED = "receiver_refused"
    RECEIVER_ERROR = "receiver_error"
    RECEIVER_STOPPED = "receiver_stopped"
    RECEIVER_FAILED = "receiver_failed"
    RECEIVING_PAUSED = "receiving_paused"
    RECEIVING_RESUMED = "receiving_resumed"
    EXECUTORS_REQUESTED = "executors_requested"
    EXECUTOR_RELEASED = "executor_released"
    TOPIC_SEEN = "topic_seen"
    TOPIC_RECREATED = "topic_recreated"
    PARTITIONS_GREW = "partitions_grew"
    PARTITION_ASSIGNED = "partition_assigned"
    PARTITION_RELEASED = "partition_released"
    PARTITION_FAILED = "partition_failed"
    PARTITION_ENDED = "partition_ended"
    BLOCK_ADDED = "block_added"
    BLOCKS_TAKEN_BACK = "blocks_taken_back"
    GAP = "gap"
    OFFSETS_REUSED = "offsets_reused"
    COMMIT_FAILED = "commit_failed"
    BATCH_ALLOCATED = "batch_allocated"
    BATCH_STARTED = "batch_started"
    OUTPUT_STARTED = "output_started"
    OUTPUT_COMPLETED = "output_completed"
    OUTPUT_FAILED = "output_failed"
    OUTPUT_ABANDONED = "output_abandoned"
    DEAD_LETTERS = "dead_letters"
    BATCH_COMPLETED = "batch_completed"
    BATCH_FAILED = "batch_failed"
    BATCH_CHECKPOINTED = "batch_checkpointed"
    BATCH_CLEANED = "batch_cleaned"
    BATCH_ABANDONED = "batch_abandoned"
    REPLAY_STARTED = "replay_started"
    REPLAY_COMPLETED = "replay_completed"
    REPLAY_FAILED = "replay_failed"
    SEGMENT_REMOVED = "segment_removed"
    LOG_DAMAGED = "log_damaged"
    LOG_REPAIRED = "log_repaired"
    CHECKPOINT_REWRITTEN = "checkpoint_rewritten"
    LEDGER_REBUILT = "ledger_rebuilt"
    OPERATOR_ACTION = "operator_action"
    PLACE_ACCEPTED = "place_accepted"
    VERSIONS_BEYOND_POSITION = "versions_beyond_position"
    SCHEMA_CHANGED = "schema_changed"
