"""A range of batches replayed into another index in one process, as one Airflow run with ``from`` and ``until`` does.

    python -m benchmarks.day_again --batches 600 --records 2000 [--rounds 3] [--transform] [--kafka] [--json]

Starts an embedded Kafka and Elasticsearch and a receiver job. It produces JSON records of 190 bytes whose timestamps
are in the past, allocates the batches of these times, and runs ``spark_jobs/micro_batch.py`` for the range
over Spark Connect. Each round replays the same batches into a new index. Airflow's own cost (some seconds for the one
run) comes on top.

With ``--kafka`` the log has none of them any more, as after `remember`, so their records are read again from Kafka.

Beside it the same documents go into another index as ready-made bulk bodies, four requests at a time. The documents of
the last round are compared with those of this index by a hash over all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.latency import complete
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.receiver_throughput import fill
from benchmarks.structured_streaming import SCHEMA, cpu_seconds
from benchmarks.warm_batch import JOBS, count, ended_cpu_seconds, environment, ready_made, received, receiver_job, until

from headrace.batch.allocation import allocate
from headrace.batch.cleanup import clean_up
from headrace.batch.results import write_results
from headrace.batch.time_range import TimeRange
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.errors import TRY_NUMBER
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, Stream
from headrace.stream.stream import replayed
from headrace.stream_context import StreamContext

_LEASE_MS = 60_000
_INTERVAL_SECONDS = 10


def define(kafka: str, elasticsearch: str, folder: Path, *, transform: bool) -> Stream:
    decoder = {"value_decoder": JsonDecoder(fields=SCHEMA)} if transform else {}
    return Stream(
        name="bench",
        inputs=KafkaInput(bootstrap_servers=kafka, topics="bench", **decoder),
        outputs=ElasticsearchOutput(hosts=elasticsearch, index="bench"),
        batch_interval=f"{_INTERVAL_SECONDS} s",
        batch_by="timestamp",
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder}/ledger.db",
        **({"transform": "benchmarks.transform:with_cents"} if transform else {}),
    )


def allocated(stream: Stream, ledger: Ledger, wanted: int, records: int) -> tuple[int, int]:
    """Allocate the batches of the records; the times before the first and of the last."""
    until("the records", lambda: received(ledger) >= wanted * records, 600)
    context = StreamContext(stream, ledger)
    times: list[int] = []
    made = 0
    while made < wanted * records:
        for unclaimed in ledger.blocks.unclaimed(stream.name):
            made += allocate(context, unclaimed.batch_time_ms).batch.records
            times.append(unclaimed.batch_time_ms)
    return min(times) - stream.batch_interval_ms, max(times)


def remove_log(stream: Stream, ledger: Ledger, span: tuple[int, int]) -> None:
    """Complete the batches of the span, and clean up the log until it has none of their blocks."""
    context = StreamContext(stream, ledger)
    times = [batch.batch_time_ms for batch in ledger.batches.between(stream.name, *span)]
    for time_ms in times:
        complete(ledger, stream.name, time_ms)
    write_results(context)

    def is_empty() -> bool:
        # The receiver closes its segments by time.
        clean_up(context)
        return all(origin.source == "kafka" for origin in ledger.batches.origins(stream.name, times).values())

    until("the log to be empty", is_empty, 300)


def replay(stream: Stream, ledger: Ledger, env: dict[str, str], index: str, span: tuple[int, int]) -> dict[str, Any]:
    """Replay the range into the index, as `ReplayBatchOperator` does. Returns the result's fields."""
    made = replayed(stream, {stream.outputs[0].id: {"index": index}})
    (step,) = made.steps
    batches = TimeRange(*span, run=index, definition=made.digest)
    first = ledger.batches.between(stream.name, *span)[0]
    attempt = ledger.replays.begin(
        stream.name,
        first.batch_time_ms,
        target=index,
        definition=made.to_json(),
        outputs=(step,),
        holder="benchmark",
        way="connect",
        lease_ms=_LEASE_MS,
        attributes={**batches.attributes, TRY_NUMBER: 1},
    )
    command = [sys.executable, str(JOBS / "micro_batch.py"), "--ledger", stream.ledger, "--stream", stream.name]
    which = ["--batch-time", str(first.batch_time_ms), "--attempt", str(attempt.number), "--way", "connect", "--json"]
    done = subprocess.run([*command, *which], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def documents(url: str, index: str) -> Iterator[tuple[str, str]]:
    """The ids and sources of all documents."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return dict(json.load(connection.getresponse()))

    page = ask(f"/{index}/_search?scroll=5m", {"size": 10_000, "sort": ["_doc"]})
    while page["hits"]["hits"]:
        yield from ((hit["_id"], json.dumps(hit["_source"], sort_keys=True)) for hit in page["hits"]["hits"])
        page = ask("/_search/scroll", {"scroll": "5m", "scroll_id": page["_scroll_id"]})


def digest(url: str, index: str) -> str:
    """A hash over the ids and sources of all documents, in the order of their ids."""
    found = hashlib.sha256()
    for document_id, source in sorted(documents(url, index)):
        found.update(f"{document_id} {source}\n".encode())
    return found.hexdigest()


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The rounds: the seconds and CPU seconds of the range, and the seconds of the limit."""
    env = environment()
    rounds: list[dict[str, float]] = []
    total = options.batches * options.records
    with KafkaServer(folder / "kafka") as kafka, ElasticsearchServer(folder / "elasticsearch") as elasticsearch:
        url = elasticsearch.url
        stream = define(kafka.bootstrap_servers, url, folder, transform=options.transform)
        spread_seconds = options.batches * _INTERVAL_SECONDS
        # A stream with batches of the last minutes is live, and goes before the range.
        fill(kafka.bootstrap_servers, "bench", total, spread_seconds, ago_seconds=3_600)
        with Ledger.open(stream.ledger) as ledger, receiver_job(stream, ledger, env, folder / "receiver.log") as job:
            span = allocated(stream, ledger, options.batches, options.records)
            if options.kafka:
                remove_log(stream, ledger, span)
            ready_made(url, "warm-up", total)
            for number in range(options.rounds):
                used, started = cpu_seconds(job) + ended_cpu_seconds(), time.monotonic()
                result = replay(stream, ledger, env, f"again-{number}", span)
                assert count(url, f"again-{number}") == result["records"] == total, result
                seconds = time.monotonic() - started
                rounds.append(
                    {
                        "batches": result["batches"],
                        "seconds": seconds,
                        "inside": result["seconds"],
                        "cpu_seconds": cpu_seconds(job) + ended_cpu_seconds() - used,
                        "limit": ready_made(url, f"limit-{number}", total),
                    }
                )
                print(f"{number}: { {name: round(figure, 2) for name, figure in rounds[-1].items()} }", file=sys.stderr)
            if not options.transform:
                assert digest(url, f"again-{options.rounds - 1}") == digest(url, f"limit-{options.rounds - 1}")
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--records", type=int, default=2_000, help="of each batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transform", action="store_true", help="decode the records, and compute a column")
    parser.add_argument("--kafka", action="store_true", help="read the records again from Kafka")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        rounds = measure(options, folder)
    total = options.batches * options.records
    kind = ", with a transform" if options.transform else ""
    kind += f"{', from Kafka' if options.kafka else ''}, batches of {options.records:,} records"
    rates = [tuple(total / each[name] for each in rounds) for name in ("seconds", "limit")]
    print_measures(
        [Measure(f"a range replayed{kind}", "records/s", rates[0], "ready-made bulk bodies", rates[1])],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
