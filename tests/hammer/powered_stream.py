"""A stream on a disk whose power is cut: its life in a process of its own, what it promised, and what a later process
finds of that.

The log, the ledger and the receivers are headrace's own (`StreamOnClock`). Kafka is in memory, and each record's value
is known from its place, so that every process has the same topic.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import Engine, event
from tests.hammer.life import without_real_waits
from tests.support.faulty_files import sync_site
from tests.support.ledger_rules import broken_rules

from headrace.batch.manifest import LOG_FOLDER
from headrace.errors import HeadraceError
from headrace.fsck.stream_check import check_stream
from headrace.ledger import Ledger
from headrace.ledger.states import BatchState
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import StreamOnClock
from headrace.wal import storage
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.recovery import NOTES, QUARANTINE

NAME, TOPIC, PARTITIONS = "shop", "clicks", 2
START_MS = 1_700_000_000_000
# Later than the leases of a life that was cut, and not so late that the log is deleted.
LIFE_MS = 60_000
STEPS = 9
LEDGER = "ledger.db"


class Place(StrEnum):
    """Where in a write of the log a process or the power ends."""

    IN_WRITE = "in the middle of"
    BEFORE_SYNC = "before"
    AFTER_SYNC = "after"


class LogEnd(NamedTuple):
    """An end at the ``number``-th time that the life comes to this ``place`` of a write or sync of
    headrace.wal.storage, which ``site`` names (as `sync_site`; of a write, without what is synced)."""

    place: Place
    site: str
    number: int


@dataclass(frozen=True, slots=True)
class LifePlan:
    """A life of the stream in ``folder``. ``left_out`` is a sync of headrace.wal.storage that is not done (None: all
    are), ``synchronous`` a setting of SQLite instead of the ledger's own. At ``log_end`` it kills the process ``kills``
    and itself (None: itself alone)."""

    folder: Path
    number: int
    seed: int
    produced: int
    left_out: str | None = None
    synchronous: str | None = None
    log_end: LogEnd | None = None
    kills: int | None = None


@dataclass(slots=True)
class Promises:
    """What a stream has said to be stored. ``produced`` is how many offsets each partition may have."""

    produced: int = 0
    stored: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By partition, the offset before which each record is in log and ledger."""
    batches: set[int] = field(default_factory=set)
    """The times of the batches that are completed and checkpointed."""

    def take(self, said: tuple[str, int, int]) -> bool:
        """Note one. Returns whether it is a promise."""
        what, key, value = said
        if what == "produced":
            self.produced = max(self.produced, value)
        elif what == "stored":
            self.stored[key] = max(self.stored[key], value)
        else:
            self.batches.add(value)
        return what != "produced"


Say = Callable[[tuple[str, int, int]], None]


def value_at(partition: int, offset: int) -> bytes:
    """The record's value: bytes that do not compress, some of them longer than a page."""
    random = Random(f"{partition} {offset}")
    return random.randbytes(random.choice((10, 300, 6_000)))


def stream_in(folder: Path) -> Stream:
    """The stream whose log and ledger are in ``folder``."""
    return Stream(
        name=NAME,
        inputs=KafkaInput(bootstrap_servers="nowhere:9092", topics=TOPIC),
        outputs=ConsoleOutput(id="console"),
        batch_interval="2 s",
        checkpoint_interval="4 s",
        remember="1 h",
        # Small segments: the first write of each is synced in another way than the others.
        limits=Limits(segment_bytes=30_000, segment_interval="3 s", seal_grace="1 s"),
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder / LEDGER}",
    )


class _Committed(dict[tuple[str, int], int]):
    """Kafka's committed offsets. The receiver commits what log and ledger have: these are its promises."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def update(self, offsets: Mapping[tuple[str, int], int]) -> None:  # type: ignore[override]
        """Say each one."""
        for (_, partition), offset in offsets.items():
            self._say(("stored", partition, offset))


class _Calls(storage.SystemCalls):
    """The operating system's calls: without one of the syncs, or up to an end."""

    plan: LifePlan
    come: ClassVar[Counter[tuple[Place, str]]] = Counter()

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        """Write, or write half of it and end."""
        writer = sys._getframe(2).f_code.co_qualname
        if self._ends(Place.IN_WRITE, writer):
            data = b"".join(parts)
            os.write(fd, data[: len(data) // 2])
            # The disk may have this half, whoever ends.
            os.fsync(fd)
            self._end()
        return super().writev(fd, parts)

    def fsync(self, fd: int) -> None:
        """Sync."""
        self._sync(super().fsync, fd, sync_site())

    def fdatasync(self, fd: int) -> None:
        """Sync."""
        self._sync(super().fdatasync, fd, sync_site())

    def _sync(self, sync: Callable[[int], None], fd: int, site: str) -> None:
        if self._ends(Place.BEFORE_SYNC, site):
            self._end()
        if site != self.plan.left_out:
            sync(fd)
        if self._ends(Place.AFTER_SYNC, site):
            self._end()

    def _ends(self, place: Place, site: str) -> bool:
        self.come[place, site] += 1
        return self.plan.log_end == LogEnd(place, site, self.come[place, site])

    def _end(self) -> None:
        for pid in filter(None, (self.plan.kills, os.getpid())):
            os.kill(pid, signal.SIGKILL)


def _set_up_sqlite(synchronous: str | None, connection: Any, record: Any, _proxy: Any) -> None:
    if isinstance(connection, sqlite3.Connection) and not record.info.get("set_up"):
        # By default there are 4 MB between two checkpoints, more than a life writes.
        connection.execute("PRAGMA wal_autocheckpoint=40")
        if synchronous is not None:
            connection.execute(f"PRAGMA synchronous={synchronous}")
        record.info["set_up"] = True


def live(plan: LifePlan, say: Say) -> None:
    """Live until the last step, or until it is killed; for a process of its own."""
    _Calls.plan = plan
    storage.SystemCalls = _Calls  # type: ignore[misc]
    event.listen(Engine, "checkout", partial(_set_up_sqlite, plan.synchronous))
    take_steps(plan, say)


def take_steps(plan: LifePlan, say: Say, *, steps: int = STEPS) -> None:
    """Receive records, and run a batch after each third step."""
    saying = threading.Lock()

    def say_in_turn(said: tuple[str, int, int]) -> None:
        with saying:
            say(said)

    kafka = FakeKafka()
    kafka.create(TOPIC, PARTITIONS)
    kafka.committed = _Committed(say_in_turn)
    ends = _produce(kafka, dict.fromkeys(range(PARTITIONS), 0), plan.produced)
    random = Random(f"{plan.seed} {plan.number}")
    with without_real_waits(), StreamOnClock(
        stream_in(plan.folder), kafka, start_ms=START_MS + plan.number * LIFE_MS
    ) as running:  # fmt: skip
        for step in range(steps):
            until = ends + random.randint(1, 4)
            say_in_turn(("produced", 0, until))
            ends = _produce(kafka, dict.fromkeys(range(PARTITIONS), ends), until)
            running.receive()
            if step % 3 == 2:
                running.advance(2)
                for batch in running.run_due():
                    say_in_turn(("completed", 0, batch.batch_time_ms))


def _produce(kafka: FakeKafka, since: Mapping[int, int], until: int) -> int:
    for partition, offset in since.items():
        kafka.produce(TOPIC, partition, *(value_at(partition, number) for number in range(offset, until)))
    return until


def problems_of(folder: Path, promises: Promises) -> list[str]:
    """What the disk lacks of what was promised, and what is damaged; for a process of its own."""
    try:
        return list(_problems_of(folder, promises))
    except (HeadraceError, sqlite3.Error) as error:
        return [f"{type(error).__name__}: {error}"]


def _problems_of(folder: Path, promises: Promises) -> Iterator[str]:
    if not (promises.batches or promises.stored):
        # The ledger's file may have no tables yet.
        return
    with closing(sqlite3.connect(folder / LEDGER)) as connection:
        found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    if found != ["ok"]:
        yield f"SQLite: {found}"
        return
    stream = stream_in(folder)
    with Ledger.open(stream.ledger) as ledger:
        log = StreamContext(stream, ledger).storage.below(LOG_FOLDER)
        yield from _lost_records(ledger, log, promises)
        for batch_time_ms in sorted(promises.batches):
            if ledger.batches.get(NAME, batch_time_ms).state is not BatchState.COMPLETED:
                yield f"batch {batch_time_ms} is not completed"
        yield from _tails_that_are_back(log)
        yield from (f"rule: {broken}" for broken in broken_rules(ledger, NAME))
        yield from (f"fsck: {finding}" for finding in check_stream(ledger, NAME, kafka=False).findings)


def _lost_records(ledger: Ledger, log: LogStorage, promises: Promises) -> Iterator[str]:
    in_log: dict[int, set[int]] = defaultdict(set)
    for stored in ledger.snapshots.take(NAME).blocks:
        try:
            _, records = read_block(log, stored.info.handle)
        except HeadraceError as error:
            yield f"the log lacks a block that the ledger has: {error}"
            continue
        for row in records.to_pylist():
            in_log[row["partition"]].add(row["offset"])
            if row["value"] != value_at(row["partition"], row["offset"]):
                yield f"offset {row['offset']} of partition {row['partition']} has other bytes"
    for partition, until in promises.stored.items():
        lost = sorted(set(range(until)) - in_log[partition])
        if lost:
            yield f"partition {partition} lacks the offsets {lost}, and all before {until} were promised"


def _tails_that_are_back(log: LogStorage) -> Iterator[str]:
    for kept in log.paths(QUARANTINE):
        segment, _, offset = kept.removeprefix(f"{QUARANTINE}/").removesuffix(".torn").rpartition("-")
        # While there is a note of it, the recovery may have been killed before it cut the tail off.
        is_cut = not log.exists(f"{NOTES}/{segment}-{offset}.json")
        if is_cut and log.exists(segment) and log.size(segment) > int(offset):
            yield f"{segment} has its torn tail again, which was cut off at {offset}"
