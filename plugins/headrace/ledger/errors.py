"""The ledger's errors.

Every error can be pickled (they cross process borders in Spark and Airflow), and none contains a password.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from headrace.blocks import TopicPartition
from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.ledger.states import STATE_STEP

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import BatchRow


def _rebuild(kind: type[LedgerError], message: str, facts: dict[str, Any]) -> LedgerError:
    error = kind.__new__(kind)
    error.args = (message,)
    error.__dict__.update(facts)
    return error


class LedgerError(HeadraceError):
    """The root of the ledger's errors."""

    def __reduce__(self) -> Any:
        # The subclasses take facts, not messages, so the default (class, args) could not rebuild them.
        return _rebuild, (type(self), str(self), self.__dict__)


class LedgerUrlError(LedgerError):
    """The ledger's URL cannot be opened."""


class LedgerUnavailableError(LedgerError):
    """The database did not answer, or another writer held it longer than the busy timeout. A retry may help."""


class LedgerLockedError(LedgerUnavailableError):
    """Another transaction held a lock of the database for longer than the caller waits."""


class LedgerFullError(LedgerUnavailableError):
    """The disk of the ledger's database is full."""


class LedgerMissingError(LedgerUnavailableError):
    """There is no ledger at the place: no task of its streams has run yet, or it was lost."""


class LedgerConflictError(LedgerError):
    """A constraint of the database refused a row. Usually an earlier check finds the conflict and names its reason."""


class SchemaError(LedgerError):
    """The database's schema is not the one that this version of headrace needs."""


class RevisionNotFoundError(LedgerError):
    """The stream has no definition with that revision."""


class StreamNotFoundError(LedgerError):
    """No stream of that name was registered."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"The ledger knows no stream {stream!r}.",
            remedy="The stream's receiver DAG registers it when it runs (KafkaReceiverOperator); is this its ledger?",
        )
        self.stream = stream


class StreamChangedError(LedgerError):
    """A registered stream's definition changed in a way that its blocks and batches do not allow."""


class LeaseHeldError(LedgerError):
    """Another holder has the lease, and it is live by the ledger's clock (times in epoch milliseconds)."""

    def __init__(self, what: str, *, holder: str, since_ms: int, until_ms: int, remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.holder = holder
        self.since_ms = since_ms
        self.until_ms = until_ms


class LeaseLostError(LedgerError):
    """The caller's epoch is stale, or its job or receiver has ended. It must stop: nothing it writes is accepted."""


class JobStoppingError(LedgerError):
    """The receiver job was asked to stop; it takes no new receivers."""


class ReceiverRefusedError(LedgerError):
    """The job's tracker has not scheduled this instance of the receiver, or has scheduled a later one."""


class PartitionNotAssignedError(LedgerError):
    """The partition does not belong to this receiver (any more): drop the records read from it."""

    def __init__(self, receiver: object, partition: TopicPartition, owner: int | None) -> None:
        belongs = "to no receiver" if owner is None else f"to receiver {owner}"
        super().__init__(
            f"{partition.topic}-{partition.partition} (topic id {partition.topic_id}) belongs {belongs}, "
            f"not to {receiver}.",
            remedy="Drop its records and start from the positions of the next heartbeat.",
        )
        self.partition = partition
        self.owner = owner


class PositionNotFoundError(LedgerError):
    """The ledger has no position for the partition."""

    def __init__(self, stream: str, input_id: str, partition: TopicPartition) -> None:
        super().__init__(
            f"Stream {stream!r}, input {input_id!r}: no position of {partition.topic}-{partition.partition} "
            f"(topic id {partition.topic_id}).",
            remedy="Call positions.ensure_all first.",
        )
        self.partition = partition


class PositionConflictError(LedgerError):
    """A range does not begin at its partition's position: the ledger ``expected`` one offset and ``got`` another.

    ``got < expected`` is an overlap, ``got > expected`` a hole.
    """

    def __init__(self, partition: TopicPartition, *, expected: int, got: int) -> None:
        self.partition = partition
        self.topic = partition.topic
        self.expected = expected
        self.got = got
        self.kind = "overlap" if got < expected else "hole"
        super().__init__(
            f"{partition.topic}-{partition.partition} (topic id {partition.topic_id}): expected offset {expected}, "
            f"got {got}, which is {'an overlap' if got < expected else 'a hole'} of {abs(got - expected)} offsets.",
            remedy="Read again from the ledger's position.",
        )


class BlockConflictError(LedgerError):
    """A sequence number was used for two different blocks, or came after a later one."""


class SegmentRemovedError(LedgerError):
    """The block's segment is being removed: write the block again, to a new segment."""


class BatchTimeError(LedgerError):
    """The time is not an interval end of the stream, or is in the future."""


class BatchRemovedError(LedgerError):
    """The batch time was removed with the stream's history."""

    failure = Failure.FINAL

    def __init__(self, stream: str, batch_time_ms: int, *, until_ms: int) -> None:
        super().__init__(
            f"Batch {time_text(batch_time_ms)} of stream {stream!r} was removed, as all up to {time_text(until_ms)} "
            "were: the stream keeps its batches for limits.history, and what this one held is no longer known.",
            remedy="It cannot be run, replayed or built again. What it wrote is where it was written.",
        )
        self.batch_time_ms = batch_time_ms


class BatchNotFoundError(LedgerError):
    """The batch time has no row: it was not allocated."""

    def __init__(self, stream: str, batch_time_ms: int) -> None:
        super().__init__(f"Stream {stream!r} has no batch {time_text(batch_time_ms)}.", remedy="Allocate it first.")
        self.batch_time_ms = batch_time_ms


class AllocationConflictError(LedgerError):
    """The manifest does not hold exactly the blocks that the ledger has for the batch time."""


class BatchStateError(LedgerError):
    """The batch's state does not allow the step."""


class ReplayOrderError(BatchStateError):
    """A replay that deletes documents by key has begun a later batch, so this one may not be written any more."""

    failure = Failure.FINAL


class AlreadyCompletedError(BatchStateError):
    """No requested output of the batch is left to run; ``batch`` is its row. Beginning it again needs ``force``.

    The batch itself has completed, unless ``outputs`` names some of its outputs and others have not completed.
    """

    def __init__(self, batch: BatchRow, outputs: Collection[str] = ()) -> None:
        state = "completed" if batch.completed_at_ms is not None else f"recorded {', '.join(outputs)}"
        super().__init__(
            f"Batch {time_text(batch.batch_time_ms)} of stream {batch.stream!r} has {state} by attempt "
            f"{batch.attempt}.",
            remedy="Begin it with force to run it again; outputs are idempotent.",
        )
        self.batch = batch
        self.outputs = tuple(outputs)


class StepsLostError(BatchStateError):
    """The batch needs ``steps`` that the stream's definition no longer has, so nothing can complete it."""

    failure = Failure.FINAL

    def __init__(self, batch: BatchRow, steps: Sequence[str]) -> None:
        at, first = time_text(batch.batch_time_ms), steps[0]
        again = f"If the output {first!r} has another id now, give it renamed_from={first!r}. If not, declare it again"
        if first == STATE_STEP:
            again = "Declare the stream's state again"
        super().__init__(
            f"Batch {at} of stream {batch.stream!r} was not written to {', '.join(map(repr, steps))}, which the "
            "definition no longer has.",
            remedy=f"{again} until such batches are done, or give it up for this batch: "
            f"`headrace batches abandon {batch.stream} {at} --output {first} --reason WHY`.",
        )
        self.steps = tuple(steps)


class OutputRenamedError(LedgerError):
    """The definition gives an output another past than the ledger knows, so its records would not be found."""

    failure = Failure.FINAL


class BatchRunningError(LedgerError):
    """A live attempt runs the batch, and the caller wanted to begin another only if none does."""


class SlotBusyError(LedgerError):
    """Other batches of the stream hold all its slots; ``busy`` are their batch times. Wait and try again."""

    def __init__(self, what: str, *, busy: Collection[int], remedy: str) -> None:
        super().__init__(what, remedy=remedy)
        self.busy = tuple(busy)


class NotItsTurnError(SlotBusyError):
    """The stream runs its batches in order, and earlier ones (``busy``) have not completed; or the batch's own state
    step has not run."""


class AttemptFencedError(LedgerError):
    """A newer attempt took the batch, or this one has ended: nothing it reports counts."""


class OutputsMissingError(LedgerError):
    """The attempt cannot complete: ``missing`` outputs have recorded no result."""

    def __init__(self, batch_time_ms: int, missing: Collection[str]) -> None:
        super().__init__(
            f"Batch {time_text(batch_time_ms)} cannot complete: no result recorded for {', '.join(sorted(missing))}.",
            remedy="Call record_output for every output of the stream, also for one that wrote nothing.",
        )
        self.missing = frozenset(missing)
