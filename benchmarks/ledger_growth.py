"""What the ledger's calls cost with 10 past batches in it, and with 10,000 batches and 1,000,000 blocks.

    python -m benchmarks.ledger_growth [--batches 10 10000] [--blocks 100] [--postgres] [--rounds 40] [--json]
                                       [--maximum 3]

Fills a ledger for each number of batches: completed and checkpointed, all of their blocks still in the log, the worst
case. Then the same rounds of work in each, in turns, so that what else the machine does falls on all of them. Prints
the medians in milliseconds, and how they relate. `--maximum` fails if a call costs more than so many times what it
costs in the smallest ledger. `--postgres` starts a real server in place of SQLite files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Table, func, insert, select, text

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import AttemptState, BatchState, EventKind, Ledger
from headrace.ledger.batches.run_batch_times import BatchBounds
from headrace.ledger.batches.tables import batch_attempts, batch_inputs, batch_outputs, batches
from headrace.ledger.receiving.tables import blocks, segments
from headrace.ledger.tables import events

STREAM, INPUT = "growth", "records"
RECEIVER = ReceiverId(STREAM, INPUT, 0)
PARTITIONS = tuple(TopicPartition("records", "topic-id", number) for number in range(4))
INTERVAL_MS = 10_000
START_MS = 1_700_000_000_000
RECORDS = 100
BLOCKS_PER_SEGMENT = 1_000
NEW_BLOCKS = 5
OUTPUTS = ("index", "files")
BOUNDS = BatchBounds(500_000, 256 * 1024 * 1024)
RUN: dict[str, Any] = {"holder": "benchmark", "way": "connect", "lease_ms": 60_000}
REPLAY: dict[str, Any] = {"target": "copy", "definition": '{"outputs": [{"id": "index"}]}', "outputs": ["index"], **RUN}


class Grown:
    """A ledger with so many past batches, and the next ones as a stream's processes make them."""

    def __init__(self, url: str, past: int, blocks_each: int) -> None:
        self.past = past
        self.clock = ManualClock(START_MS)
        self.ledger = Ledger.open(url, clock=self.clock)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.ledger.streams.register(
            STREAM,
            "{}",
            batch_interval_ms=INTERVAL_MS,
            block_interval_ms=200,
            outputs=OUTPUTS,
            ordered=True,
            batch_by="timestamp",
        )
        self.job = self.ledger.jobs.acquire(STREAM, holder="benchmark", lease_ms=10**12)
        self.ledger.topics.observe(self.job, INPUT, [("records", "topic-id", len(PARTITIONS))])
        self.ledger.positions.ensure_all(self.job, INPUT, dict.fromkeys(PARTITIONS, 0))
        self.ledger.positions.assign(self.job, INPUT, dict.fromkeys(PARTITIONS, 0))
        self.lease = self.ledger.receivers.register(
            self.ledger.receivers.schedule(self.job, RECEIVER), host="here", lease_ms=10**12
        )
        self.next_offset, self.sequence = 0, 0
        self._fill(past, blocks_each)
        self.oldest_ms = START_MS + INTERVAL_MS
        self.clock.advance(past * INTERVAL_MS)

    def round(self) -> None:
        """One batch from its blocks to its checkpoint, with the sensors' looks, and what a person looks at."""
        ledger, found = self.ledger, self.ledger.batches
        for _ in range(NEW_BLOCKS):
            info = self._block(self.clock.now_ms())
            self._time("blocks.add", ledger.blocks.add, self.lease, info)
        batch_ms = self.clock.now_ms() + INTERVAL_MS
        self.clock.advance(INTERVAL_MS)
        drained = dict.fromkeys(PARTITIONS, self.clock.now_ms())
        self._time("heartbeat", ledger.receivers.heartbeat, self.lease, sealed_through_ms=0, drained=drained)
        self._time("sensor: unsealed", ledger.receivers.unsealed, STREAM, batch_ms)
        self._time("sensor: unpassed", ledger.positions.unpassed, STREAM, batch_ms)
        self._time("sensor: find", found.find, STREAM, batch_ms)
        self._time("sensor: earlier_unfinished", found.earlier_unfinished, STREAM, batch_ms)
        self._time("runs.take", ledger.runs.take, STREAM, f"run-{batch_ms}", bounds=BOUNDS, date_ms=batch_ms)
        self._time("allocation", self._allocate, batch_ms)
        for output in OUTPUTS:
            attempt = self._time("attempt: begin", ledger.attempts.begin, STREAM, batch_ms, outputs=[output], **RUN)
            self._time("attempt: record", ledger.attempts.record_output, attempt, output, {"indexed": 1})
            batch = self._time("attempt: complete", ledger.attempts.complete, attempt)
        self._time("results: behind", ledger.results.behind, STREAM)
        self._time("mark_checkpointed", found.mark_checkpointed, STREAM, [batch.filed("r", batch_ms)])
        self._replay(batch_ms)
        self._look(batch_ms)

    def _replay(self, batch_ms: int) -> None:
        replay = self._time("replay: begin", self.ledger.replays.begin, STREAM, batch_ms, **REPLAY)
        self.ledger.attempts.record_output(replay, "index", {})
        self._time("replay: complete", self.ledger.attempts.complete, replay)

    def _look(self, batch_ms: int) -> None:
        ledger, found = self.ledger, self.ledger.batches
        window = range(batch_ms - 5 * INTERVAL_MS, batch_ms, INTERVAL_MS)
        last = ledger.events.latest(STREAM, None, 1)[0].event_id
        states = (BatchState.FAILED, BatchState.RUNNING, BatchState.ALLOCATED)
        self._time("page: batches.page", found.page, STREAM, 5)
        self._time("page: batches.page of states", found.page, STREAM, 5, states)
        self._time("page: uncleaned", found.uncleaned, STREAM, 5)
        self._time("page: unclaimed", ledger.blocks.unclaimed, STREAM)
        self._time("page: events.page", ledger.events.page, STREAM, last - 20)
        self._time("page: events.latest of a kind", ledger.events.latest, STREAM, [EventKind.GAP], 20)
        self._time(
            "page: one batch", lambda: (found.inputs(STREAM, batch_ms), ledger.attempts.outputs(STREAM, batch_ms))
        )
        self._time("window: origins", found.origins, STREAM, window)
        self._time("containing", found.containing, STREAM, INPUT, PARTITIONS[0], 50)
        self._time("cleanup: nothing to remove", self._removable, self.oldest_ms)
        self._time("cleanup: one old segment", self._removable, self.oldest_ms + 10 * INTERVAL_MS)
        self._time("cleanup: needed_from", ledger.cleanup.needed_from, STREAM)

    def _removable(self, before_ms: int) -> object:
        return (
            self.ledger.cleanup.removable_segments(STREAM, before_ms),
            self.ledger.cleanup.cleanable_batches(STREAM, before_ms),
        )

    def _allocate(self, batch_ms: int) -> object:
        found = self.ledger.batches
        self.ledger.allocations.seal(STREAM, batch_ms)
        earlier = found.absorbable(STREAM, batch_ms)
        taken = self.ledger.allocations.blocks_of(STREAM, batch_ms, absorb=earlier)
        return self.ledger.allocations.allocate(
            STREAM, batch_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=len(taken), absorb=earlier
        )

    def _time(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments, **named)
        self.times[name].append(time.perf_counter() - started)
        return result

    def _ranges(self) -> tuple[OffsetRange, ...]:
        start = self.next_offset
        self.next_offset += RECORDS
        return tuple(OffsetRange(tp, start, self.next_offset, RECORDS) for tp in PARTITIONS)

    def _block(self, event_time_ms: int) -> BlockInfo:
        self.sequence += 1
        return BlockInfo(
            receiver=RECEIVER,
            epoch=self.lease.epoch,
            sequence=self.sequence,
            cut_time_ms=event_time_ms,
            handle=BlockHandle("new", self.sequence * 1_000, 1_000),
            ranges=self._ranges(),
            records=RECORDS * len(PARTITIONS),
            payload_bytes=80_000,
            event_time_ms=event_time_ms,
        )

    # --- the past, as it would stand there, written at once

    def _fill(self, past: int, blocks_each: int) -> None:
        with self.ledger.streams._database.write() as connection:
            segment_count = -(-past * blocks_each // BLOCKS_PER_SEGMENT)
            for start in range(0, segment_count, 1_000):
                numbers = range(start, min(start + 1_000, segment_count))
                connection.execute(insert(segments), [self._segment(number, blocks_each) for number in numbers])
            for start in range(0, past, 100):
                rows: dict[Table, list[dict[str, Any]]] = defaultdict(list)
                for number in range(start, min(start + 100, past)):
                    self._past_batch(number, blocks_each, rows)
                for table in (blocks, batches, batch_inputs, batch_attempts, batch_outputs, events):
                    connection.execute(insert(table), rows[table])
            connection.execute(
                text("UPDATE positions SET next_offset = :offset, last_batch_time_ms = :time"),
                {"offset": self.next_offset, "time": START_MS + past * INTERVAL_MS},
            )
            connection.execute(
                text("UPDATE streams SET sealed_until_ms = :time"), {"time": START_MS + past * INTERVAL_MS}
            )
            if not self.ledger.streams._database.is_sqlite:
                self._advance_sequences(connection)
        with self.ledger.streams._database.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")

    @staticmethod
    def _advance_sequences(connection: Any) -> None:
        for table, key in ((blocks, "block_id"), (segments, "segment_id")):
            newest = connection.execute(select(func.max(table.c[key]))).scalar_one()
            connection.execute(select(func.setval(func.pg_get_serial_sequence(table.name, key), newest)))

    @staticmethod
    def _segment(number: int, blocks_each: int) -> dict[str, Any]:
        last_block = (number + 1) * BLOCKS_PER_SEGMENT - 1
        return {
            "segment_id": number + 1,
            "stream": STREAM,
            "path": f"{number}",
            "input_id": INPUT,
            "receiver_index": 0,
            "epoch": 0,
            "opened_at_ms": START_MS,
            "closed_at_ms": START_MS,
            "last_batch_time_ms": START_MS + (last_block // blocks_each + 1) * INTERVAL_MS,
        }

    def _past_batch(self, number: int, blocks_each: int, rows: dict[Table, list[dict[str, Any]]]) -> None:
        batch_ms = START_MS + (number + 1) * INTERVAL_MS
        key = {"stream": STREAM, "batch_time_ms": batch_ms}
        first = self.next_offset
        for place in range(number * blocks_each, (number + 1) * blocks_each):
            rows[blocks].append(
                {
                    **key,
                    "block_id": place + 1,
                    "input_id": INPUT,
                    "receiver_index": 0,
                    "epoch": 0,
                    "sequence": place,
                    "cut_time_ms": batch_ms - 1,
                    "event_time_ms": batch_ms - 1,
                    "added_at_ms": batch_ms,
                    "segment_id": place // BLOCKS_PER_SEGMENT + 1,
                    "frame_offset": place % BLOCKS_PER_SEGMENT * 1_000,
                    "frame_length": 1_000,
                    "ranges": self._ranges(),
                    "records": RECORDS * len(PARTITIONS),
                    "payload_bytes": 80_000,
                }
            )
            rows[events].append(_event(batch_ms, EventKind.BLOCK_ADDED, None, block_id=place + 1))
        rows[batches].append(_completed(key, batch_ms, blocks_each))
        for tp in PARTITIONS:
            rows[batch_inputs].append(
                {
                    **key,
                    "input_id": INPUT,
                    "topic": tp.topic,
                    "topic_id": tp.topic_id,
                    "partition": tp.partition,
                    "incarnation": tp.incarnation,
                    "from_offset": first,
                    "until_offset": self.next_offset,
                    "records": self.next_offset - first,
                    "blocks": blocks_each,
                }
            )
        for attempt, output in enumerate(OUTPUTS, 1):
            rows[batch_attempts].append(_attempt(key, batch_ms, attempt, output))
            rows[batch_outputs].append(
                {
                    **key,
                    "attempt": attempt,
                    "output_id": output,
                    "target": "",
                    "state": AttemptState.COMPLETED,
                    "counts": {"indexed": 1},
                    "recorded_at_ms": batch_ms,
                }
            )
        for kind in (EventKind.BATCH_ALLOCATED, EventKind.BATCH_STARTED, EventKind.BATCH_COMPLETED):
            rows[events].append(_event(batch_ms, kind, batch_ms))


def _completed(key: dict[str, Any], batch_ms: int, blocks_each: int) -> dict[str, Any]:
    return {
        **key,
        "interval_ms": INTERVAL_MS,
        "state": BatchState.COMPLETED,
        "revision": 1,
        "manifest_uri": "file:///storage/growth/manifests/1.json",
        "manifest_sha256": "0" * 64,
        "blocks": blocks_each,
        "records": blocks_each * RECORDS * len(PARTITIONS),
        "payload_bytes": blocks_each * 80_000,
        "late_records": 0,
        "built": False,
        "absorbed": [],
        "attempt": len(OUTPUTS),
        "steps": list(OUTPUTS),
        "allocated_at_ms": batch_ms,
        "started_at_ms": batch_ms,
        "completed_at_ms": batch_ms + 1,
        "checkpointed_at_ms": batch_ms + 2,
        "checkpoint_uri": "c",
    }


def _attempt(key: dict[str, Any], batch_ms: int, number: int, output: str) -> dict[str, Any]:
    return {
        **key,
        "number": number,
        "target": "",
        "holder": "past",
        "way": "connect",
        "source": "log",
        "state": AttemptState.COMPLETED,
        "outputs": [output],
        "attributes": {"run_id": f"scheduled__{batch_ms}"},
        "started_at_ms": batch_ms,
        "lease_ms": 60_000,
        "lease_until_ms": batch_ms + 60_000,
        "heartbeat_ms": batch_ms,
        "ended_at_ms": batch_ms + 1,
    }


def _event(at_ms: int, kind: EventKind, batch_time_ms: int | None, *, block_id: int | None = None) -> dict[str, Any]:
    payload = {"receiver": "growth/records/0", "records": RECORDS}
    return {
        "stream": STREAM,
        "at_ms": at_ms,
        "kind": kind.value,
        "batch_time_ms": batch_time_ms,
        "block_id": block_id,
        "payload": payload,
    }


@contextlib.contextmanager
def urls(*, postgres: bool) -> Iterator[Callable[[int], str]]:
    """Makes the URL of an empty database for each number."""
    with tempfile.TemporaryDirectory(prefix="headrace-growth-") as folder:
        if not postgres:
            yield lambda number: f"sqlite:///{folder}/ledger-{number}.db"
            return
        # Postgres runs as nobody under root.
        Path(folder).chmod(0o755)
        with PostgresServer(Path(folder)) as server:
            yield lambda number: server.create_database(f"growth_{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--blocks", type=int, default=100, help="of each past batch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--maximum", type=float, help="fail if a call costs more than so many times as at first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with urls(postgres=options.postgres) as url_of:
        ledgers = []
        for past in options.batches:
            started = time.perf_counter()
            ledgers.append(Grown(url_of(past), past, options.blocks))
            filled = time.perf_counter() - started
            print(f"{past:,} batches, {past * options.blocks:,} blocks: filled in {filled:.0f} s", file=sys.stderr)
        for _ in range(options.rounds):
            for grown in ledgers:
                grown.round()
        medians = {
            name: [statistics.median(grown.times[name]) * 1_000 for grown in ledgers] for name in ledgers[0].times
        }
        for grown in ledgers:
            grown.ledger.close()
    ratios = {name: values[-1] / values[0] for name, values in medians.items()}
    if options.json:
        kind = "postgres" if options.postgres else "sqlite"
        described = {"database": kind, "batches": options.batches, "blocks": options.blocks, "rounds": options.rounds}
        print(json.dumps(described | {"milliseconds": medians, "ratios": ratios}))
    else:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {options.rounds} rounds")
        print(f"{'milliseconds with batches':32}" + "".join(f"{past:>10,}" for past in options.batches) + "  ratio")
        for name, values in medians.items():
            print(f"{name:32}" + "".join(f"{value:10.2f}" for value in values) + f"{ratios[name]:7.2f}")
    worst = max(ratios, key=lambda name: ratios[name])
    if options.maximum is not None and ratios[worst] > options.maximum:
        raise SystemExit(f"{worst} costs {ratios[worst]:.1f} times as much, more than {options.maximum}")


if __name__ == "__main__":
    main()
