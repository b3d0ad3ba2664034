"""What a writer of one kind of output is given, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.ledger.rows import BatchOrigin
    from headrace.spark.incarnations import BatchIncarnations
    from headrace.spark.transforms import BatchContext
    from headrace.stream import Stream

Counts = dict[str, Any]
"""What became of a batch's rows: an output's own names and numbers, as JSON has them."""


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The batch that is being written.

    ``undecodable`` holds, by input id, the records that do not decode, as far as there are any. ``from_kafka``: the
    records are read from Kafka again, since the log has let them go. ``earlier`` are the other batches that the output
    reads, those of its window; ``incarnations`` gives the topics' incarnations of all that it reads.
    ``written_before``: an earlier attempt may have written documents of this batch to the output; ``tried_before``: it
    was to, and may have left dead letters. ``target`` names a replay's copy of the output, "" the output itself.
    ``out`` is where a console prints, ``tell`` gets lines on the progress, for people.
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
        """Whether rows that a transform makes of a batch without records are of use to this output."""
        ...

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Write the rows, once in effect however often it is called for the same batch.

        ``frame`` is None for an empty batch that needs no Spark, and where it is, no session is there either.

        Raises:
            HeadraceError: the rows do not fit the output, or its server refuses them; the batch can be run again.
        """
        ...
