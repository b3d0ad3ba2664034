"""Random damage, a few hundred cases here: HEADRACE_DAMAGES=10000 for a long search, HEADRACE_SEED for another one.

Each case is a log that writers left, with one to three random damages. It is read with and without the ledger, under
each recovery mode and by handle: no record that was not written, none missed in silence, no more read than there is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from tests.support.log_damage import KINDS, Damage, damage_file
from tests.support.memory_storage import MemoryStorage
from tests.support.written_log import Key, WrittenLog, write_log

from headrace.blocks import BlockInfo, OffsetRange
from headrace.wal.errors import DamagedFrameError, SegmentMissingError, WalError
from headrace.wal.log_storage import LogStorage, RandomAccessFile
from headrace.wal.reader import read_block
from headrace.wal.recovery import LogScan, scan_log
from headrace.wal.scan import RecoveryMode, ScannedFrame

DAMAGES = int(os.environ.get("HEADRACE_DAMAGES", "200"))
SEED = int(os.environ.get("HEADRACE_SEED", "20130101"))
STRICT = (RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS, RecoveryMode.ABSOLUTE_CONSISTENCY)
BATCHES = 10
LOGS = 5  # Of each batch: writing one takes longer than damaging it.


class MeteredStorage(MemoryStorage):
    """Counts what is read, and refuses to be asked for more than a file has."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        super().__init__(files)
        self.read_bytes = 0

    def open(self, path: str) -> RandomAccessFile:
        file = super().open(path)
        plain = file.read_at

        def read_at(offset: int, length: int) -> object:
            data = plain(offset, length)
            self.read_bytes += data.size
            return data

        file.read_at = read_at  # type: ignore[method-assign]
        return file

    @property
    def bytes(self) -> int:
        return sum(map(len, self.files.values()))


def check_reading(log: WrittenLog, storage: LogStorage) -> None:
    """Read ``storage``, a damaged copy, in every way there is; AssertionError where a reader returns what was not
    written, or misses what was accepted without a word."""
    for mode in RecoveryMode:
        check_with_ledger(log, storage, mode)
        check_without_ledger(log, storage, mode)
    for key, block in log.accepted.items():
        try:
            header, batch = read_block(storage, block.handle)
        except WalError:
            continue
        assert header.ranges == block.ranges
        assert batch.equals(log.batches[key])


def check_with_ledger(log: WrittenLog, storage: LogStorage, mode: RecoveryMode) -> None:
    scan = scan_log(storage, accepted=log.accepted_in, expected=log.expected, mode=mode)
    seen, error = read(log, scan, mode)
    missing = [block for key, block in log.accepted.items() if key not in seen]
    if mode in STRICT and error is None:
        assert not missing, f"missed in silence under {mode.name}"
    elif error is not None:
        assert error.ranges is not None, f"the ledger knows what is lost, and the error does not say so: {error}"
        assert error.exact
        assert not Counter(error.ranges) - ranges_of(missing), "said to be lost, and was read"
    elif mode is RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS:
        reported = [*(damaged.ranges or () for damaged in scan.damage), *(lost.ranges or () for lost in scan.missing)]
        assert Counter(r for ranges in reported for r in ranges) == ranges_of(missing)
    elif missing:
        assert scan.damage or scan.missing
        check_prefixes(log, seen)


def check_without_ledger(log: WrittenLog, storage: LogStorage, mode: RecoveryMode) -> None:
    scan = scan_log(storage, mode=mode)
    seen, error = read(log, scan, mode)
    if error is not None or mode is RecoveryMode.POINT_IN_TIME_RECOVERY:
        return
    reported = [(tail.segment, tail.offset) for tail in scan.torn_tails]
    reported += [(damage.segment, damage.offset) for damage in scan.damage]
    gone = {missing.segment for missing in scan.missing}
    for key, block in log.accepted.items():
        if key in seen:
            continue
        handle = block.handle
        is_reported = any(segment == handle.segment and at < handle.offset + handle.length for segment, at in reported)
        # The two things that no log knows of itself; the ledger does.
        is_newest = handle.segment in scan.open or not storage.exists(handle.segment)
        assert is_reported or handle.segment in gone or is_newest, f"{key} missed in silence under {mode.name}"


def read(
    log: WrittenLog, scan: LogScan, mode: RecoveryMode
) -> tuple[set[Key], DamagedFrameError | SegmentMissingError | None]:
    keys: list[Key] = []
    error: DamagedFrameError | SegmentMissingError | None = None
    try:
        for frame in scan:
            keys.append(key_of(log, frame))
    except (DamagedFrameError, SegmentMissingError) as met:
        assert mode in STRICT, f"{mode.name} raised {met}"
        error = met
    assert keys == sorted(set(keys)), "out of order, or twice"
    return set(keys), error


def key_of(log: WrittenLog, frame: ScannedFrame) -> Key:
    header = frame.header
    key = (header.receiver.index, header.epoch, header.sequence)
    assert frame.batch().equals(log.batches[key]), f"{key} is not what was written"
    if key in log.accepted:
        assert (header.ranges, frame.handle) == (log.accepted[key].ranges, log.accepted[key].handle)
    return key


def check_prefixes(log: WrittenLog, seen: set[Key]) -> None:
    """What a recovery to a point in time returns of a receiver has no hole."""
    for index in {key[0] for key in log.accepted}:
        is_there = [key in seen for key in sorted(log.accepted) if key[0] == index]
        assert is_there == sorted(is_there, reverse=True)


def ranges_of(blocks: Iterable[BlockInfo]) -> Counter[OffsetRange]:
    return Counter(r for block in blocks for r in block.ranges)


def do_damage(storage: MemoryStorage, random: Random) -> list[Damage]:
    done = []
    for _ in range(random.choice((1, 1, 2, 3))):
        paths = [path for path in storage.paths() if path.endswith(".wal")]
        if paths:
            path = random.choice(paths)
            others = [other for other in paths if other != path]
            done.append(damage_file(storage, path, random.choice(list(KINDS)), random, others=others))
    return done


def check_case(log: WrittenLog, random: Random) -> None:
    storage = MeteredStorage({path: bytearray(data) for path, data in log.storage.files.items()})
    done = do_damage(storage, random)
    try:
        check_reading(log, storage)
        # Eight scans and a read by handle; a scan reads a byte a few times at most: checked, looked for, looked ahead.
        assert storage.read_bytes <= 60 * (storage.bytes + sum(map(len, log.storage.files.values()))) + (1 << 20)
    except Exception as error:
        error.add_note("after " + "; ".join(map(str, done)))
        raise


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_record_is_wrong_or_missing_in_silence(batch: int) -> None:
    logs = [write_log(Random(f"{SEED}-{batch}-{number}")) for number in range(LOGS)]
    for case in range(DAMAGES // BATCHES):
        name = f"{SEED}-{batch}-{case}"
        try:
            check_case(logs[case % LOGS], Random(name))
        except Exception as error:
            error.add_note(f"in case {name} of HEADRACE_SEED={SEED}")
            raise


def test_a_log_that_nothing_happened_to_is_read_whole() -> None:
    for number in range(20):
        log = write_log(Random(f"{SEED}-whole-{number}"))
        check_reading(log, log.storage)
