"""Derives a stream's state in its lost ledger from the contents of its folder.

`headrace.batch.accepted_blocks` decides which blocks of the log count, `headrace.batch.rebuilt_batches` makes the
batches of manifests and results, `headrace.batch.rebuilt_positions` the positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.batch.accepted_blocks import accepted_blocks, in_order
from headrace.batch.found_files import FolderContents, partition_of, spans_of
from headrace.batch.rebuilt_batches import RebuiltBatches, first_batch_time, rebuild_batches
from headrace.batch.rebuilt_positions import rebuild_positions
from headrace.blocks import BlockHandle, BlockInfo, InputPartition
from headrace.ledger.rebuild import FoundBatch, FoundStream
from headrace.ledger.receiving.tables import PositionRow, SegmentRow, StoredBlock, TopicRow
from headrace.ledger.states import BatchState
from headrace.ledger.streams import new_stream
from headrace.ledger.tables import Declared, GapRow, StreamRevision, StreamRow
from headrace.stream import Stream

EPOCH_JUMP = 1_000
"""Added to the known epochs, for those since the newest checkpoint that left nothing in the log."""
_ATTEMPTS = 100
"""A rebuilt ledger numbers its attempts from a multiple of this, at least half of it above the known ones."""
_FIRST_ATTEMPT_AT_MS = 1_577_836_800_000
"""The start of 2020. Without a mark the attempts are numbered from the seconds since then."""


def rebuild_stream(
    contents: FolderContents, definition: Stream | None, *, now_ms: int
) -> tuple[FoundStream, list[str]]:
    """Derive the stream's state from the contents of its folder. Returns it with notices for a person.

    Args:
        definition: becomes the stream's definition. Without it that of the checkpoint does, so it is needed if there is
            no checkpoint.

    Raises:
        ContradictionError: blocks overlap, or their orders contradict each other.
        ManifestError: a batch's manifest is missing or damaged.
        ResultError: a batch's result is damaged, and its log was deleted.
    """
    saved = contents.saved
    declared = None if definition is None else Declared.by(definition)
    if saved.stream is not None:
        # The DAG's definition is the newer one, whatever the file says of its own age.
        stream, revisions = replace(saved.stream, declared_at_ms=0), saved.revisions
    elif declared is not None:
        stream = new_stream(contents.stream, declared, now_ms)
        revisions = [StreamRevision(**declared.columns(), revision=stream.revision, created_at_ms=now_ms)]
    else:
        raise ValueError("A stream of which no checkpoint can be read needs its definition.")
    recorded = Stream.from_json(stream.definition)
    accepted = accepted_blocks(contents)
    rebuilt = rebuild_batches(
        contents,
        stream,
        {info.handle: info for info in accepted.blocks},
        folder_url=(definition or recorded).folder_url,
        coalesces=recorded.coalesces,
        now_ms=now_ms,
    )
    blocks = _with_batch_times(contents, stream, accepted.blocks, rebuilt, now_ms)
    positions = rebuild_positions(contents, blocks, rebuilt.batches, now_ms)
    job_epoch = max([stream.job_epoch, contents.job_epoch, *(receiver.job_epoch for receiver in saved.receivers)])
    epochs = {**contents.epochs}
    for receiver in saved.receivers:
        epochs[receiver.receiver_id] = max(receiver.epoch, epochs.get(receiver.receiver_id, 0))
    writers = {info.handle.segment: (info.receiver, info.epoch) for info in accepted.blocks}
    found = FoundStream(
        stream=replace(
            stream,
            job_epoch=job_epoch + EPOCH_JUMP,
            sealed_until_ms=max([stream.sealed_until_ms, *(batch.row.batch_time_ms for batch in rebuilt.batches)]),
            zero_time_ms=_zero_time_ms(stream, blocks, rebuilt.batches)
            if saved.stream is None
            else stream.zero_time_ms,
        ),
        revisions=revisions,
        declared=declared,
        receiver_epochs={receiver_id: epoch + EPOCH_JUMP for receiver_id, epoch in epochs.items()},
        last_attempt=_last_attempt(contents, rebuilt, now_ms),
        topics=_topics(contents, positions.positions, now_ms),
        positions=positions.positions,
        segments=[
            SegmentRow(0, contents.stream, path, *writer, now_ms, None, contents.segments.get(path), None, None)
            for path, writer in writers.items()
        ],
        blocks=blocks,
        batches=rebuilt.batches,
        replay_definitions=saved.replay_definitions,
        gaps=_gaps(contents, rebuilt.batches, now_ms),
        found_gaps=positions.gaps,
        runs={
            **saved.runs,
            **{run_id: time_ms for time_ms, result in contents.results.by_time.items() for run_id in result.runs},
        },
        notes={
            "checkpoint": saved.path,
            "undecided_blocks": len(accepted.undecided),
            "refused_blocks": accepted.refused,
            "gaps": len(positions.gaps),
            "lost": [part.what for part in contents.lost if not part.is_tail],
            # By this the ledger is known as the folder's (`headrace.stream_folder`).
            "mark": None if contents.mark is None else contents.mark.to_json(),
        },
    )
    undecided = [
        f"Block {info.handle} of {info.receiver} is of its writer's last write, and nothing shows whether the ledger "
        "had accepted it: it counts, since no other block has its offsets. Kafka is not read again for it; a queue "
        "that had not been told that it is stored gives its records once more."
        for info in accepted.undecided
    ]
    return found, [*contents.notices, *rebuilt.notices, *undecided, *positions.notices]


def _last_attempt(contents: FolderContents, rebuilt: RebuiltBatches, now_ms: int) -> int:
    """A number above those of all attempts at any batch, also by an earlier lost ledger.

    The mark has the highest number, since an attempt leaves it before it writes anything. Two that left theirs in one
    moment may have left the lower one. A folder of an earlier version has no mark; then only the time is sure to be
    above what a ledger that was lost with its attempts had.
    """
    known = [batch.row.attempt for batch in rebuilt.batches]
    if contents.mark is None and known:
        return max((now_ms - _FIRST_ATTEMPT_AT_MS) // 1_000, *(number + EPOCH_JUMP for number in known))
    highest = max([*known, 0 if contents.mark is None else contents.mark.attempt])
    return -(-(highest + _ATTEMPTS // 2) // _ATTEMPTS) * _ATTEMPTS


def _with_batch_times(
    contents: FolderContents, stream: StreamRow, blocks: Sequence[BlockInfo], rebuilt: RebuiltBatches, now_ms: int
) -> list[StoredBlock]:
    """All blocks with their batch times, in the order for the ledger.

    A block that no manifest lists gets the batch time of its cut, or a later one: not before the batch times of earlier
    blocks in its partitions, and not one that was sealed when it was added, as far as that is known.
    """
    saved, rows = contents.saved, [batch.row for batch in rebuilt.batches]
    block_of = {block.info.handle: block for block in rebuilt.blocks}
    # What followed an absorbed time in a partition follows the batch that absorbed it.
    owners = {row.batch_time_ms: row.absorbed_by_ms or row.batch_time_ms for row in rows}
    known = {receiver.receiver_id: (receiver.epoch, receiver.last_accepted_sequence) for receiver in saved.receivers}
    moved = {(r.input_id, r.receiver_index, r.epoch, r.sequence): r.batch_time_ms for r in saved.moved_blocks}
    unsealed_ms = 0 if saved.stream is None else stream.batch_time_after(stream.sealed_until_ms)
    latest: dict[InputPartition, int] = {key: row.last_batch_time_ms for key, row in saved.positions.items()}
    # A partition with blocks in the log takes its latest batch time from them, one after the other.
    latest |= {key: 0 for info in blocks for key, _ in spans_of(info)}
    for info in blocks:
        of_block = [key for key, _ in spans_of(info)]
        if info.handle not in block_of:
            first_ms = moved.get((info.receiver.input_id, info.receiver.index, info.epoch, info.sequence), 0)
            batch_time_ms = max([first_ms or first_batch_time(stream, info), *(latest[key] for key in of_block)])
            if (info.epoch, info.sequence) > known.get(info.receiver, (0, -1)):
                batch_time_ms = max(batch_time_ms, unsealed_ms)
            while batch_time_ms in owners:
                batch_time_ms += stream.batch_interval_ms
            block_of[info.handle] = StoredBlock(0, batch_time_ms, now_ms, info)
        batch_time_ms = block_of[info.handle].batch_time_ms
        for key in of_block:
            latest[key] = max(latest[key], owners.get(batch_time_ms, batch_time_ms))
    # Each batch's blocks keep their manifest's order, so that the same manifest can be written again.
    runs: dict[tuple[int, str], list[BlockHandle]] = defaultdict(list)
    for block in rebuilt.blocks:
        runs[block.batch_time_ms, block.info.receiver.input_id].append(block.info.handle)
    return [block_of[info.handle] for info in in_order(blocks, runs.values())]


def _zero_time_ms(stream: StreamRow, blocks: Iterable[StoredBlock], batches: Iterable[FoundBatch]) -> int:
    """The zero time, moved before everything that was received: received records must not be built from Kafka again."""
    times = [block.batch_time_ms for block in blocks]
    for batch in batches:
        if batch.inputs and not batch.row.built:
            times += [*batch.row.absorbed, batch.row.batch_time_ms]
    return min([stream.zero_time_ms, *(batch_time_ms - stream.batch_interval_ms for batch_time_ms in times)])


def _topics(contents: FolderContents, positions: Iterable[PositionRow], now_ms: int) -> list[TopicRow]:
    """The checkpoint's topics, with partitions seen since, and the topics first seen since."""
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    incarnations: dict[tuple[str, str, str], int] = {}
    for input_id, partition in map(partition_of, positions):
        key = (input_id, partition.topic, partition.topic_id)
        sizes[key] = max(sizes[key], partition.partition + 1)
        incarnations[key] = partition.incarnation
    rows = []
    for row in contents.saved.topics:
        size = sizes.pop((row.input_id, row.topic, row.topic_id), 0)
        rows.append(replace(row, partitions=max(row.partitions, size)))
    # The latest incarnation of a topic name is the current one.
    newest = {key[:2]: incarnations[key] for key in sorted(sizes, key=incarnations.__getitem__)}
    rows = [replace(row, current=row.current and (row.input_id, row.topic) not in newest) for row in rows]
    for key, size in sizes.items():
        is_newest = incarnations[key] == newest[key[:2]]
        rows.append(TopicRow(contents.stream, *key, incarnations[key], size, size, False, is_newest, now_ms, now_ms))
    return rows


def _gaps(contents: FolderContents, batches: Iterable[FoundBatch], now_ms: int) -> list[GapRow]:
    """The checkpoint's gaps, oldest first, and those of the batches that were abandoned after it."""
    gaps = sorted(contents.saved.gaps, key=lambda gap: gap.gap_id)
    known = {gap.batch_time_ms for gap in gaps}
    # Blocks that vanished have a gap already.
    starts = {(partition_of(gap), gap.from_offset) for gap in gaps}
    for batch in batches:
        time_ms, why = batch.row.batch_time_ms, f"batch abandoned: {batch.row.error}"
        if batch.row.state is BatchState.ABANDONED and time_ms not in known:
            for taken in batch.inputs:
                key, span = partition_of(taken), (taken.from_offset, taken.until_offset)
                if (key, span[0]) not in starts:
                    gaps.append(GapRow(0, contents.stream, *key, *span, why, time_ms, now_ms))
    return gaps
