"""Reads blocks back by their handles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from headrace.blocks import BlockHandle
from headrace.wal import frame
from headrace.wal.errors import (
    DamagedFrameError,
    FrameTooLongError,
    LogVersionError,
    PayloadError,
    SegmentMissingError,
    StoredFileMissingError,
)
from headrace.wal.frame import AnyHeader, FrameFault, FrameHeader, FrameKind, decode
from headrace.wal.local_copies import BlockCopies
from headrace.wal.log_storage import LogStorage, RandomAccessFile

# Adjacent blocks are fetched together up to this many bytes: on an object store a request costs more than the bytes.
MAX_FETCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose checksums match."""

    kind: FrameKind
    header: AnyHeader
    payload: pa.Buffer
    length: int


class ReadBlock(NamedTuple):
    """A block and where it was."""

    handle: BlockHandle
    header: FrameHeader
    batch: pa.RecordBatch


def read_block(storage: LogStorage, handle: BlockHandle) -> tuple[FrameHeader, pa.RecordBatch]:
    """Read the block at ``handle``; ``storage`` is rooted at the log (``storage.below(root)``).

    Raises SegmentMissingError, DamagedFrameError (with the lost ranges if the header can be read), LogVersionError and
    FrameTooLongError (the handle is longer than any frame).
    """
    (block,) = read_blocks(storage, [handle])
    return block.header, block.batch


def read_blocks(
    storage: LogStorage, handles: Iterable[BlockHandle], copies: BlockCopies | None = None
) -> Iterator[ReadBlock]:
    """Read the blocks at ``handles``, segment by segment in the order of their offsets; each segment is opened once.

    ``handles`` are of blocks that the ledger has. With ``copies``, a block that has a valid copy is not read from
    ``storage``.

    Raises as ``read_block`` does: FrameTooLongError before the first block, anything else at the block concerned.
    """
    by_segment: dict[str, list[BlockHandle]] = defaultdict(list)
    for handle in handles:
        if not frame.PREFIX_BYTES < handle.length <= frame.MAX_FRAME_BYTES or handle.offset < 0:
            raise FrameTooLongError(f"{handle} is no block's handle: frames have up to {frame.MAX_FRAME_BYTES} bytes.")
        by_segment[handle.segment].append(handle)
    for segment in sorted(by_segment):
        in_order = sorted(by_segment[segment])
        yield from _read_log(storage, in_order) if copies is None else _read_either(storage, in_order, copies)


def read_frame(data: pa.Buffer, *, segment: int, offset: int) -> Frame:
    """Parse and check the frame at the start of ``data``; FrameFault if there is none.

    ``data`` starts at ``offset`` of the segment with the id ``segment``. It may hold less or more than the frame.
    """
    prefix = frame.parse_prefix(
        data[: frame.PREFIX_BYTES].to_pybytes(),
        segment=segment,
        offset=offset,
        header=lambda length: data[frame.PREFIX_BYTES : frame.PREFIX_BYTES + length].to_pybytes(),
    )
    body = frame.PREFIX_BYTES + prefix.header_length
    header = frame.parse_header(prefix, data[frame.PREFIX_BYTES : body].to_pybytes())
    payload = data[body : prefix.frame_length]
    try:
        frame.check_payload(prefix, payload)
    except FrameFault as fault:
        raise FrameFault(
            fault.reason, truncated=fault.truncated, header=header, end=offset + prefix.frame_length
        ) from fault
    return Frame(prefix.kind, header, payload, prefix.frame_length)


def decode_block(handle: BlockHandle, header: FrameHeader, payload: pa.Buffer) -> pa.RecordBatch:
    """The block's records; DamagedFrameError when the payload does not fit the header."""
    try:
        batch = decode(payload, header.raw_bytes)
    except PayloadError as error:
        raise DamagedFrameError(handle.segment, handle.offset, error.what, header.ranges) from error
    if batch.num_rows != header.records:
        reason = f"the payload has {batch.num_rows} records, its header says {header.records}"
        raise DamagedFrameError(handle.segment, handle.offset, reason, header.ranges)
    return batch


def _read_either(storage: LogStorage, handles: list[BlockHandle], copies: BlockCopies) -> Iterator[ReadBlock]:
    """Read the blocks of one segment: those with a valid copy from it, the others from the log."""
    uncopied: list[BlockHandle] = []
    for handle in handles:
        block = _read_copy(copies, handle)
        if block is None:
            uncopied.append(handle)
            continue
        yield from _read_log(storage, uncopied)
        uncopied = []
        yield block
    yield from _read_log(storage, uncopied)


def _read_copy(copies: BlockCopies, handle: BlockHandle) -> ReadBlock | None:
    data = copies.read(handle)
    if data is None:
        return None
    try:
        header, payload = _block(handle, data, frame.segment_id(handle.segment))
        block = ReadBlock(handle, header, decode_block(handle, header, payload))
    except (DamagedFrameError, LogVersionError) as error:
        copies.reject(handle, error)
        return None
    copies.used(handle)
    return block


def _read_log(storage: LogStorage, handles: list[BlockHandle]) -> Iterator[ReadBlock]:
    """Read the blocks of one segment, which is opened once."""
    if not handles:
        return
    segment = handles[0].segment
    try:
        file = storage.open(segment)
    except StoredFileMissingError as error:
        raise SegmentMissingError(segment, named_by=f"the handle of a block at {handles[0].offset}") from error
    with file:
        for run in _runs(handles):
            yield from _read_run(file, run)


def _runs(handles: list[BlockHandle]) -> Iterator[list[BlockHandle]]:
    """Group adjacent handles, up to ``MAX_FETCH_BYTES`` a group."""
    run: list[BlockHandle] = []
    for handle in handles:
        if run and (
            handle.offset != run[-1].offset + run[-1].length
            or handle.offset + handle.length - run[0].offset > MAX_FETCH_BYTES
        ):
            yield run
            run = []
        run.append(handle)
    if run:
        yield run


def _read_run(file: RandomAccessFile, run: list[BlockHandle]) -> Iterator[ReadBlock]:
    start = run[0].offset
    data = file.read_at(start, run[-1].offset + run[-1].length - start)
    segment = frame.segment_id(run[0].segment)
    for handle in run:
        at = handle.offset - start
        header, payload = _block(handle, data[at : at + handle.length], segment)
        yield ReadBlock(handle, header, decode_block(handle, header, payload))


def _block(handle: BlockHandle, data: pa.Buffer, segment: int) -> tuple[FrameHeader, pa.Buffer]:
    try:
        read = read_frame(data, segment=segment, offset=handle.offset)
    except FrameFault as fault:
        if fault.foreign:
            raise LogVersionError(handle.segment, handle.offset, fault.reason) from fault
        reason = f"{fault.reason} (the handle says {handle.length} bytes, the file has {data.size} of them)"
        ranges = fault.header.ranges if isinstance(fault.header, FrameHeader) else None
        raise DamagedFrameError(
            handle.segment, handle.offset, reason if data.size < handle.length else fault.reason, ranges
        ) from fault
    if not isinstance(read.header, FrameHeader):
        raise DamagedFrameError(handle.segment, handle.offset, f"this is a {read.kind.name.lower()}, no block")
    if read.length != handle.length:
        reason = f"the frame has {read.length} bytes, its handle says {handle.length}"
        raise DamagedFrameError(handle.segment, handle.offset, reason, read.header.ranges)
    return read.header, read.payload
