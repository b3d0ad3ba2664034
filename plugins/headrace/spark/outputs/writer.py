"""What writes a batch to an output: the interface, what it gets of the batch, and how it reports what it wrote.

Over Spark Connect a write's commit runs in a process of the server and cannot return values to the caller. So it writes
a small JSON file, the report, to the stream's folder. The caller reads and deletes it, and the counts go into the
ledger. Warnings of the tasks are in files beside it, and are passed on while the write runs.

No error of an output ever contains a credential.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from headrace.elasticsearch.counts import take_warnings
from headrace.errors import Failure, HeadraceError
from headrace.stream.model import load_reference
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from headrace.elasticsearch.counts import HeldVersion
    from headrace.ledger.batches.tables import BatchOrigin
    from headrace.spark.attempts.shared_jobs import BatchBlocks, BlockTask
    from headrace.spark.outputs.documents import BatchIncarnations
    from headrace.spark.records.transforms import BatchContext
    from headrace.stream import ElasticsearchOutput, Output, Stream


Counts = dict[str, Any]
"""The outcomes of a batch's rows: names and JSON values that each kind of output defines."""


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The batch that is being written.

    ``from_kafka``: the records are read again from Kafka, because the log does not have them. ``undecodable``: returns
    the records that do not decode, by input id, for inputs that have any; it is fast after the rows were written, and
    before it reads all records. ``earlier``: the other batches that the output reads, those of its window.
    ``incarnations``: returns the topic incarnations of all batches that it reads. ``written_before``: an earlier
    attempt may have written documents of this batch to the output. ``tried_before``: an earlier attempt included the
    output and may have written dead letters. ``former_steps``: earlier attempts may have written the batch to the
    output's place under these other steps (``headrace.spark.attempts.former_outputs``). ``target``: the name of a
    replay, "" for the stream's own output; ``stream_steps``: the steps that the stream itself may have written the
    batch with, of a replay. ``known_place``: returns the place to which the newest batch of an output was written
    (``headrace.batch.places``), and ``known_places`` those of some of the names that its rows have. ``left_behind``:
    returns the indices of earlier attempts at the batch that are none of these names. ``check_held_versions``: see
    ``headrace.batch.held_versions``. ``out``: where a console output prints. ``progress``: receives lines of text on
    the progress.
    """

    stream: Stream
    context: BatchContext
    batch_time_ms: int
    attempt: int
    manifest_uri: str
    from_kafka: bool
    target: str
    out: IO[str]
    progress: Callable[[str], None]
    undecodable: Callable[[], Mapping[str, DataFrame]] = dict
    earlier: tuple[BatchOrigin, ...] = ()
    incarnations: Callable[[], BatchIncarnations] | None = None
    written_before: bool = False
    tried_before: bool = False
    former_steps: tuple[str, ...] = ()
    stream_steps: tuple[str, ...] = ()
    known_place: Callable[[ElasticsearchOutput], Mapping[str, Any] | None] = lambda _: None
    known_places: Callable[[ElasticsearchOutput, Collection[str]], Mapping[str, Mapping[str, Any]]] = lambda *_: {}
    left_behind: Callable[[ElasticsearchOutput, Collection[str]], list[str]] = lambda *_: []
    check_held_versions: Callable[[str, Mapping[tuple[str, int], HeldVersion]], str | None] = lambda *_: None


class OutputWriter(Protocol):
    """Writes batches to one output."""

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Write the rows. Repeated calls for the same batch have the effect of one.

        ``frame`` is None for an empty batch that needs no Spark; then there is no session.

        Raises:
            HeadraceError: the rows do not fit the output, or its server refuses them; the batch can be run again.
        """
        ...


class RunBlocks(Protocol):
    """Runs a task in Spark for the records of the blocks. ``schema`` is that of its results, as DDL."""

    def __call__(self, task: BlockTask, blocks: BatchBlocks, schema: str) -> pa.Table: ...


class BlockWriter(OutputWriter, Protocol):
    """A writer whose tasks can read the log, or Kafka again, themselves, if nothing decodes or transforms its records
    (`OutputDefinition.takes_blocks`). So the records do not pass through the JVM."""

    def write_blocks(self, run: RunBlocks, blocks: BatchBlocks, batch: WrittenBatch) -> Counts:
        """Write the records of these blocks as they are, by tasks that ``run`` runs. Otherwise as `write`."""
        ...


def writer_of(output: Output) -> OutputWriter:
    """The writer of an output. Imports the module that the output's class names (``writer``), and what that needs."""
    writer = load_reference(output.writer, f"writer of output {output.id!r}")
    return writer(output)  # type: ignore[operator, no-any-return]


REPORTS_FOLDER = "reports"
WARNING = "warning: "
"""The prefix of a progress line that is a warning."""
_POLL_SECONDS = 1.0
# The least time between two reported warnings: every task of a write may warn of the same.
_REPORT_SECONDS = 15.0

logger = logging.getLogger(__name__)


@contextmanager
def report_file(batch: WrittenBatch, name: str) -> Iterator[str]:
    """A context manager that gives the URI of a write's report and deletes the report at the end.

    During the ``with`` block the write's warnings are reported to ``batch.progress``. The URI is unique to the attempt:
    no other output of the batch and no replay has the same.
    """
    folder = f"{batch.stream.folder_url}/{REPORTS_FOLDER}"
    replay = f"{batch.target}-" if batch.target else ""
    file = f"{batch.batch_time_ms}-{replay}{batch.attempt}-{name}.json"
    uri = f"{folder}/{file}"
    over = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(uri, name, batch.progress, over), name="headrace-warnings", daemon=True
    )
    listener.start()
    try:
        yield uri
    finally:
        over.set()
        listener.join(2 * _POLL_SECONDS)
        open_storage(folder).delete(file)


def counted(write: Callable[[str], None], batch: WrittenBatch, output_id: str) -> Counts:
    """Call ``write`` with the URI for its report. Returns the counts that it wrote there with `leave_counts`.

    Raises CountsMissingError if it wrote none.
    """
    with report_file(batch, f"{output_id}-counts") as uri:
        write(uri)
        folder, _, name = uri.rpartition("/")
        try:
            return cast("Counts", json.loads(open_storage(folder).read(name)))
        except StoredFileMissingError:
            raise CountsMissingError(
                f"Output {output_id!r} was written, but its counts are not in {folder}.",
                remedy="Make sure that Spark sees the stream's storage where it runs, and run the batch again.",
            ) from None


def leave_counts(uri: str, counts: Counts) -> None:
    """Write the counts to the URI from `counted`."""
    folder, _, name = uri.rpartition("/")
    open_storage(folder).write_atomically(name, json.dumps(counts).encode())


def _listen(uri: str, name: str, progress: Callable[[str], None], over: threading.Event) -> None:
    """Report the first warning at once; later ones at most every ``_REPORT_SECONDS``, with their number."""
    held: list[str] = []
    reported_at = -_REPORT_SECONDS
    while True:
        ended = over.wait(_POLL_SECONDS)
        try:
            held += take_warnings(uri)
        except Exception as error:
            # Not an error: the write itself reports its result.
            logger.debug("the warnings of %s cannot be read: %s", uri, error)
        if held and (ended or time.monotonic() >= reported_at + _REPORT_SECONDS):
            more = f" (and {len(held) - 1} more like it)" if len(held) > 1 else ""
            progress(f"{WARNING}output {name}: {held[-1]}{more}")
            held, reported_at = [], time.monotonic()
        if ended:
            return


class OutputError(HeadraceError):
    """The base class of the errors of outputs."""


class OutputRowsError(OutputError):
    """The rows have a column that the output cannot write, or lack one that it needs."""

    failure = Failure.CODE


class OutputOptionsError(OutputError):
    """An option of the output's data source is missing or invalid."""

    failure = Failure.CODE


class AttemptReplacedError(OutputError):
    """A later attempt at the batch replaced this one; what this attempt wrote is discarded."""


class CountsMissingError(OutputError):
    """The write ended without reporting its counts."""
