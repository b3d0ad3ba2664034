"""Fills a ledger with streams and batches, quickly and without Kafka, Spark or Airflow: for the page and for tests.

    python -m tests.support.seeded_ledger sqlite:////tmp/ledger.db --streams 20 --batches 10000

Each stream is in one of the `SITUATIONS`, in turn. Rows are written as headrace would write them, except that blocks of
old batches are gone from the log, as after cleanup.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import insert

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import batch_attempts, batch_inputs, batch_outputs, batches
from headrace.ledger.tables import SampleRow, events, samples, streams
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, Limits, Stream

SITUATIONS = ("well", "falling_behind", "failing", "paused", "stopped", "stalled", "starting")
INTERVAL_MS = 10_000
PARTITIONS = 2
_TOPIC_ID = "seeded-topic-id-000000"
_SAMPLE_MS = 10_000
_AT_ONCE = 2_000
_LEASE_MS = 24 * 3_600_000
_ERROR = "document_parsing_exception: failed to parse field [cents] of type [long] in document with id 'orders+0+4711'"


def seed(ledger: Ledger, *, streams: int = 7, batches: int = 200, ledger_url: str | None = None) -> list[str]:
    """Add streams with batches up to now. Returns the streams' names, "orders", "orders-2" and so on.

    ``ledger_url``: what the definitions name as their ledger; by default this one's URL.
    """
    names = []
    for index in range(streams):
        situation = SITUATIONS[index % len(SITUATIONS)]
        name = "orders" if index == 0 else f"orders-{index + 1}"
        _Seeding(ledger, name, situation, batches, ledger_url or ledger.url).run()
        names.append(name)
    return names


class _Seeding:
    """One stream."""

    def __init__(self, ledger: Ledger, name: str, situation: str, count: int, ledger_url: str) -> None:
        self.ledger, self.name, self.situation, self.count = ledger, name, situation, count
        self.stream = Stream(
            name=name,
            inputs=KafkaInput(
                connection="kafka_default", topics="orders", value_decoder=JsonDecoder(fields="item STRING, cents INT")
            ),
            outputs=ElasticsearchOutput(connection="elasticsearch_default", index="orders"),
            batch_interval="10 s",
            storage="/var/lib/headrace",
            ledger=ledger_url,
            limits=Limits(max_log_bytes=1 << 30),
        )
        self.output = self.stream.outputs[0].id
        self.input = self.stream.inputs[0].id
        self.now_ms = ledger.now_ms()
        self.late_ms = {"stalled": 1_800_000, "starting": 600_000}.get(situation, 0)
        newest_ms = (self.now_ms - self.late_ms) // INTERVAL_MS * INTERVAL_MS
        self.times = range(newest_ms - (count - 1) * INTERVAL_MS, newest_ms + 1, INTERVAL_MS)

    def run(self) -> None:
        stream, ledger = self.stream, self.ledger
        ledger.streams.register(
            self.name,
            stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
            outputs=stream.steps,
        )
        self._batches()
        if self.situation != "starting":
            self._receiving()
        if self.situation == "stopped":
            ledger.streams.set_desired_state(self.name, "stopped")

    # -- batches ---------------------------------------------------------------------------------------------------

    def _records(self, index: int) -> int:
        wave = 1 + 0.6 * math.sin(index / 40) + 0.2 * math.sin(index / 3)
        return int(8_000 * wave)

    def _delays(self, index: int) -> tuple[int, int]:
        """Milliseconds from the batch time to the start, and from there to the completion."""
        start, work = 2_600 + index * 37 % 900, 2_400 + self._records(index) // 6
        if index % 97 == 0:
            work += 9_000
        if self.situation == "falling_behind" and index > self.count - 40:
            start += (index - self.count + 40) * 2_500
            work += 8_000
        return start, work

    def _batches(self) -> None:
        for part in _parts(list(enumerate(self.times))):
            rows: dict[Any, list[dict[str, Any]]] = {
                table: [] for table in (batches, batch_attempts, batch_inputs, batch_outputs, events, samples)
            }
            for index, time_ms in part:
                self._batch(index, time_ms, rows)
            with self.ledger._database.write() as connection:
                for table, values in rows.items():
                    if values:
                        connection.execute(insert(table), values)
        with self.ledger._database.write() as connection:
            last = {"sealed_until_ms": self.times[-1], "zero_time_ms": self.times[0] - INTERVAL_MS}
            connection.execute(streams.update().where(streams.c.name == self.name).values(**last))

    def _batch(self, index: int, time_ms: int, rows: dict[Any, list[dict[str, Any]]]) -> None:
        start, work = self._delays(index)
        records = self._records(index)
        failed = self.situation == "failing" and index >= self.count - 3
        started_ms, ended_ms = time_ms + start, min(time_ms + start + work, self.now_ms)
        common = {"stream": self.name, "batch_time_ms": time_ms}
        attempts = 3 if failed else 1
        rows[batches].append(
            {
                **common,
                **{"interval_ms": INTERVAL_MS, "revision": 1, "manifest_sha256": "0" * 64},
                "state": "failed" if failed else "completed",
                "manifest_uri": f"file:///var/lib/headrace/{self.name}/manifests/{time_ms}.json",
                "code_version": None if failed else "sha256:4f2a",
                **{"blocks": 50, "records": records, "payload_bytes": records * 190, "absorbed": ()},
                **{"attempt": attempts, "allocated_at_ms": time_ms + 1_400, "started_at_ms": started_ms},
                "completed_at_ms": None if failed else ended_ms,
                "checkpointed_at_ms": None if failed else ended_ms + 400,
                "checkpoint_uri": None if failed else f"file:///var/lib/headrace/{self.name}/results/1-1.json",
                "cleaned_at_ms": None if failed or index > self.count - 4 else ended_ms + 12_000,
                **{"cleanup": None, "absorbed_by_ms": None, "error": _ERROR if failed else None},
                **{"required": (self.output,), "steps": None if failed else (self.output,)},
            }
        )
        for number in range(1, attempts + 1):
            end_ms = min(ended_ms + (number - 1) * 8_000, self.now_ms)
            rows[batch_attempts].append(
                {
                    **common,
                    **{"number": number, "holder": "task generate_batch", "way": "connect", "outputs": (self.output,)},
                    "state": "failed" if failed else "completed",
                    **{"attributes": {}, "lease_ms": 60_000, "lease_until_ms": end_ms, "heartbeat_ms": end_ms},
                    **{"started_at_ms": min(started_ms + (number - 1) * 8_000, end_ms), "ended_at_ms": end_ms},
                    **{"error": _ERROR if failed else None, "revision": 1},
                    "code_version": None if failed else "sha256:4f2a",
                }
            )
            counts: dict[str, float] = {
                "indexed": records - 2,
                "dead_lettered": 2 if index % 50 == 0 else 0,
                "repeated": 0,
            }
            if index % 50 == 0:
                counts |= {"throttled_requests": 5, "throttled_seconds": 12.4}
            rows[batch_outputs].append(
                {
                    **common,
                    **{"attempt": number, "output_id": self.output, "counts": {} if failed else counts},
                    **{"recorded_at_ms": end_ms, "state": "failed" if failed else "completed"},
                    "error": _ERROR if failed else None,
                }
            )
        for partition in range(PARTITIONS):
            half = records // PARTITIONS
            # Wide enough apart that no two batches share an offset.
            first = index * 20_000
            rows[batch_inputs].append(
                {
                    **common,
                    **{"input_id": self.input, "topic": "orders", "topic_id": _TOPIC_ID, "partition": partition},
                    **{"incarnation": 1, "from_offset": first, "until_offset": first + half},
                    **{"records": half, "blocks": 25},
                }
            )
        for kind, at_ms, payload in self._events(time_ms, started_ms, ended_ms, records, failed=failed):
            rows[events].append(
                {**common, "at_ms": at_ms, "kind": kind, "block_id": None, "payload": payload},
            )
        if time_ms <= self.now_ms:
            rows[samples].append(self._sample(index, time_ms, records).to_columns())

    def _events(
        self, time_ms: int, started_ms: int, ended_ms: int, records: int, *, failed: bool
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        size: dict[str, Any] = {"records": records, "blocks": 50, "payload_bytes": records * 190, "late_records": 0}
        size |= {"interval_ms": INTERVAL_MS, "absorbed": [], "allocated_at_ms": time_ms + 1_400}
        yield "batch_allocated", time_ms + 1_400, {**size, "attempt": 0, "started_at_ms": None}
        begun = {**size, "attempt": 1, "started_at_ms": started_ms}
        yield "batch_started", started_ms, {**begun, "way": "connect", "outputs": [self.output], "continues": False}
        if failed:
            yield "batch_failed", ended_ms, {**begun, "outputs": {}, "failures": {self.output: _ERROR}, "error": _ERROR}
        else:
            yield "batch_completed", ended_ms, {**begun, "outputs": {self.output: {}}, "failures": {}, "error": None}

    def _sample(self, index: int, at_ms: int, records: int) -> SampleRow:
        behind = self.situation == "falling_behind" and index > self.count - 40
        lag = (index - self.count + 40) * 4_000 if behind else index % 13
        return SampleRow(
            stream=self.name,
            at_ms=at_ms,
            input_rate=records / 10,
            lag=lag,
            lag_seconds=lag / 800 if behind else 0.0,
            queue_bytes=index * 8_191 % 900_000,
            paused=self.situation == "paused" and index > self.count - 5,
            log_bytes=20_000_000 + index * 104_729 % 9_000_000,
        )

    # -- receiving -------------------------------------------------------------------------------------------------

    def _receiving(self) -> None:
        ledger, situation = self.ledger, self.situation
        lease_ms = 1 if situation == "stalled" else _LEASE_MS
        counts = {"dropped": 12 if situation == "falling_behind" else 0, "missed": 0, "failed": 0}
        inputs: dict[str, Any] = {self.input: {"asked_ms": self.now_ms, "error": None, "topics": {}}}
        job = ledger.jobs.acquire(
            self.name,
            holder="receiver-job-1",
            lease_ms=lease_ms,
            versions={"headrace": "0.1.0", "pyspark": "4.2.0", "python": "3.11.9"},
            attributes={
                **{"host": "worker-1", "pid": 4711, "ui_url": "http://127.0.0.1:4040"},
                **{"inputs": inputs, "listeners": {"webhook": counts}},
            },
        )
        ledger.jobs.update(job, state="running")
        ledger.topics.observe(job, self.input, [("orders", _TOPIC_ID, PARTITIONS)])
        partitions = [TopicPartition("orders", _TOPIC_ID, index) for index in range(PARTITIONS)]
        ledger.positions.ensure_all(job, self.input, dict.fromkeys(partitions, self.count * 20_000))
        receiver_id = ReceiverId(self.name, self.input, 0)
        scheduled = ledger.receivers.schedule(job, receiver_id)
        lease = ledger.receivers.register(scheduled, host="worker-1", lease_ms=lease_ms)
        ledger.receivers.runs_on(scheduled, "3")
        if situation == "failing":
            stack = 'Traceback (most recent call last):\n  File "shop.py", line 7, in read\nOSError: no route to host\n'
            ledger.receivers.report_error(lease, "OSError: no route to host", stack)
        ledger.positions.assign(job, self.input, dict.fromkeys(partitions, 0))
        lag = 160_000 if situation == "falling_behind" else 7
        stats = {
            **{"rate": 812.4, "records": 81_000, "blocks": 500, "bytes": 15_390_000, "partitions": PARTITIONS},
            **{"queued_blocks": 1, "queued_bytes": 30_000, "total_lag": lag, "lag_unknown": 0},
            **{
                "lag_seconds": lag / 800,
                "lag": {"orders": {str(n): [lag // PARTITIONS, lag / 800] for n in range(PARTITIONS)}},
            },
        }
        paused = "the disk has 0.4 GiB free, less than 1 GiB; receiving continues when there is more"
        ledger.receivers.heartbeat(
            lease,
            sealed_through_ms=self.now_ms,
            stats=stats,
            paused_reason=paused if situation == "paused" else None,
        )
        for sequence in range(3):
            start = self.count * 20_000 + sequence * 100
            ranges = (OffsetRange(partitions[0], start, start + 100, 100),)
            handle = BlockHandle(f"{self.input}-0-{lease.epoch}-1.wal", sequence * 19_000, 19_000)
            ledger.blocks.add(
                lease, BlockInfo(receiver_id, lease.epoch, sequence, self.now_ms, handle, ranges, 100, 19_000)
            )
        if situation == "stopped":
            ledger.receivers.release(lease, state="stopped")
            ledger.jobs.release(job, state="stopped")


def _parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Fill a ledger with streams and batches.")
    parser.add_argument("ledger", help="its URL")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--batches", type=int, default=200, help="of each stream")
    asked = parser.parse_args()
    with Ledger.open(asked.ledger) as ledger:
        print("\n".join(seed(ledger, streams=asked.streams, batches=asked.batches)))


if __name__ == "__main__":
    main()
