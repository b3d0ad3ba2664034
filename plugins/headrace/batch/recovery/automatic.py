"""Rebuilds a lost ledger without a person, as Spark's ``StreamingContext.getOrCreate``: ``Stream.recover``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

from headrace.batch.recovery.folder_contents import FolderContents, Progress
from headrace.batch.recovery.lost_ledger import LostLedgerError, refuse_if_lost
from headrace.batch.recovery.recover import MayStillRunError, Recovered, RecoveryRefusedError, Step, recover
from headrace.ledger.errors import LedgerError
from headrace.stream import Input, ReceiverInput, Stream
from headrace.stream_context import StreamContext

# A receiver without its ledger may write one more block, and ends within a minute.
_MOST_WAITS = 3


def recover_if_lost(
    context: StreamContext, *, progress: Progress = lambda _: None, wait: Callable[[float], object] | None = None
) -> Recovered | None:
    """Rebuild the stream's ledger if the ledger does not know the stream, and its folder holds data of an earlier one.

    Waits until no process of the lost ledger can still run: for its lease or a minute after the last sign of it.
    ``wait`` waits some seconds, by default on the stream's clock.
    Returns None if nothing was lost.

    Raises:
        RecoveryRefusedError: the folder holds the data of another stream, or a process still writes to it.
        WalError, ManifestError, HistoryError, CheckpointVersionError, ContradictionError: as `recover`.
    """
    wait = wait or partial(context.clock.wait, threading.Event())
    lost = _what_is_lost(context)
    if lost is not None:
        progress(f"{lost} The ledger is rebuilt from there.")
    waits = 0
    while _what_is_lost(context) is not None:
        try:
            done = recover(
                context.name,
                context.ledger,
                context.storage,
                definition=context.stream,
                check=lambda contents: _refuse_another_stream(contents, context.stream),
                progress=progress,
            )
            # Another task may have rebuilt it just before.
            return done if Step.LEDGER_REBUILT in done.steps else None
        except MayStillRunError as error:
            if waits == _MOST_WAITS:
                raise RecoveryRefusedError(
                    f"The ledger does not know stream {context.name!r}, and a process writes to its folder "
                    f"{context.stream.folder_url} all the same: it has another ledger.",
                    remedy="Name the ledger that the running receiver job has. If that one is lost, stop the job: "
                    f"`headrace streams stop {context.name} --storage {context.stream.storage.url}`.",
                ) from error
            waits += 1
            progress(f"a process of the lost ledger may still run; waiting {error.left_ms / 1000:.0f} s for its end")
            wait(error.left_ms / 1000 + 0.001)
        except LedgerError:
            # Another task may have rebuilt it in the meantime.
            if _what_is_lost(context) is not None:
                raise
    return None


def _what_is_lost(context: StreamContext) -> str | None:
    try:
        refuse_if_lost(context)
    except LostLedgerError as lost:
        return lost.what
    return None


def _refuse_another_stream(contents: FolderContents, stream: Stream) -> None:
    """Refuse a folder whose records are not of this stream's inputs: its offsets would say nothing about them."""
    saved = contents.saved
    if saved is not None and saved.checkpoint.stream != stream.name:
        raise _of_another(stream, f"its checkpoint is of stream {saved.checkpoint.stream!r}")
    inputs = {source.id: source for source in stream.inputs}
    if saved is not None:
        for recorded in Stream.from_json(saved.stream.definition).inputs:
            source = inputs.get(recorded.id)
            if source is not None and _origin(source) != _origin(recorded):
                raise _of_another(stream, f"input {recorded.id!r} was received from {_origin(recorded)}")
    for input_id, topic in sorted(set(_received(contents))):
        source = inputs.get(input_id)
        if source is None or not source.matches(topic):
            raise _of_another(stream, f"it holds records of topic {topic!r}, received for input {input_id!r}")


def _received(contents: FolderContents) -> Iterator[tuple[str, str]]:
    """The input and the topic of all that was received."""
    yield from ((input_id, partition.topic) for input_id, partition in contents.positions)
    for frame in contents.frames:
        yield from ((frame.info.receiver.input_id, each.partition.topic) for each in frame.info.ranges)
    if contents.saved is not None:
        yield from ((row.input_id, row.partition.topic) for row in contents.saved.positions)


def _origin(source: Input) -> str:
    if isinstance(source, ReceiverInput):
        return f"receiver {source.receiver}"
    return f"connection {source.connection!r}" if source.connection is not None else str(source.bootstrap_servers)


def _of_another(stream: Stream, why: str) -> RecoveryRefusedError:
    return RecoveryRefusedError(
        f"The ledger does not know stream {stream.name!r}, and the data in {stream.folder_url} does not fit its "
        f"definition: {why}.",
        remedy=f"If it is this stream's all the same: `headrace streams recover {stream.name} --storage "
        f"{stream.storage.url}`. To begin anew, give the stream another name, or move the folder away.",
    )
