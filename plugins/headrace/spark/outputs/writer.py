"""The interface of output writers: the batch that they get and the counts that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.ledger.models import BatchOrigin
    from headrace.spark.incarnations import BatchIncarnations
    from headrace.spark.transforms import BatchContext
    from headrace.stream import Stream

Counts = dict[str, Any]
"""The outcomes of a batch's rows: names and JSON values that each kind of output defines."""


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The batch that is being written.

    ``undecodable``: the records that do not decode, by input id, for inputs that have any. ``from_kafka``: the records
    are read again from Kafka, because the log does not have them. ``earlier``: the other batches that the output reads,
    those of its window. ``incarnations``: returns the topic incarnations of all batches that it reads.
    ``written_before``: an earlier attempt may have written documents of this batch to the output. ``tried_before``: an
    earlier attempt included the output and may have written dead letters. ``target``: the name of a replay, "" for the
    stream's own output. ``out``: where a console output prints. ``progress``: receives lines of text on the progress.
    """

    stream: Stream
    context: BatchContext
    batch_time_ms: int
    attempt: int
    manifest_uri: str
    from_kafka: bool
    target: str
    undecodable: Mapping[str, DataFrame]
    out: IO[str]
    progress: Callable[[str], None]
    earlier: tuple[BatchOrigin, ...] = ()
    incarnations: Callable[[], BatchIncarnations] | None = None
    written_before: bool = False
    tried_before: bool = False


class OutputWriter(Protocol):
    """Writes batches to one output."""

    @property
    def needs_empty_batches(self) -> bool:
        """Whether this output can use rows that a transform makes from a batch without records."""
        ...

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Write the rows. Repeated calls for the same batch have the effect of one.

        ``frame`` is None for an empty batch that needs no Spark; then there is no session.

        Raises:
            HeadraceError: the rows do not fit the output, or its server refuses them; the batch can be run again.
        """
        ...
