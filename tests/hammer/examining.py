"""Collects the data to judge: from Kafka, Elasticsearch, the ledger's public rows and `headrace streams fsck`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.kafka_side import offsets, read_topic
from examples.demo.proof import Place, Proof, prove
from tests.hammer.judgement import Fsck, KafkaAgainstReceipts, compare_with_receipts, uncovered, wrong_keys
from tests.hammer.load import Load
from tests.hammer.pipeline import DEAD_LETTERS, INDEX, KEYS_INDEX, STREAM, TOPIC, records

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_MAX_BATCHES = 100_000
_CANNOT_CHECK = 2
_FSCK_SECONDS = 60.0
_HEADRACE = (sys.executable, "-m", "headrace.cli.main")


def examine_records(
    bootstrap_servers: str, elasticsearch: ElasticsearchSide, load: Load, *, seed: int, keys: bool
) -> tuple[KafkaAgainstReceipts, Proof, list[str]]:
    """Compare the producer's receipts with Kafka, and Kafka with Elasticsearch. Returns also what is wrong by key."""
    again = read_topic(bootstrap_servers, TOPIC)
    kafka = compare_with_receipts(load.receipts, islice(records(seed), load.sent), again.values)
    malformed = set(load.receipts.malformed) | _malformed_in_doubt(load, again.values, seed)
    # Records whose delivery failed but which Kafka has stored must be indexed like all others.
    in_doubt = len(again.values.keys() - set(load.receipts.places.values())) if load.receipts.refused else 0
    proof = prove(
        produced=kafka.acknowledged + in_doubt,
        held=again.held,
        records=again.values,
        malformed=malformed,
        documents=elasticsearch.documents(INDEX),
        dead_letters=elasticsearch.dead_letters(DEAD_LETTERS),
    )
    return kafka, proof, wrong_keys(again.values, elasticsearch.documents(KEYS_INDEX)) if keys else []


def _malformed_in_doubt(load: Load, held: Mapping[Place, bytes | None], seed: int) -> set[Place]:
    if not load.receipts.refused:
        return set()
    values = {
        one.value for one in islice(records(seed), load.sent) if one.damage and one.number in load.receipts.refused
    }
    return {place for place, value in held.items() if value in values}


def examine_batches(ledger: Ledger, bootstrap_servers: str) -> list[str]:
    """The offsets that are in no batch or in two. The batches' offset ranges should cover Kafka's exactly once."""
    taken: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for batch in ledger.batches.page(STREAM, _MAX_BATCHES):
        for one in ledger.batches.inputs(STREAM, batch.batch_time_ms):
            taken[one.partition.partition].append((one.from_offset, one.until_offset, batch.batch_time_ms))
    return uncovered(offsets(bootstrap_servers, TOPIC), taken, topic=TOPIC)


def run_fsck(ledger_url: str, environment: Mapping[str, str]) -> Fsck:
    """Run `headrace streams fsck` for the stream; retry for a while if it could not check everything."""
    deadline = time.monotonic() + _FSCK_SECONDS
    while True:
        done = subprocess.run(
            [*_HEADRACE, "streams", "fsck", STREAM, "--ledger", ledger_url],
            capture_output=True,
            text=True,
            check=False,
            env=dict(environment),
        )
        if done.returncode != _CANNOT_CHECK or time.monotonic() > deadline:
            return Fsck(done.returncode, done.stdout + done.stderr)
