"""The stream that is hammered, as a user would write it, and the records that go through it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from examples.demo.damage import Damage
from examples.demo.proof import Place

STREAM = TOPIC = INDEX = "hammer"
PARTITIONS = 4
RECEIVERS = 2
DEAD_LETTERS = f"{INDEX}-dead-letters"
KEYS_INDEX = f"{INDEX}-keys"
KEYS_TRANSFORM = "hammer_keys"

# Every so many offsets of a partition the same keys come again, and every third time they are deleted.
_KEYS_OF_A_PARTITION = 500
_ROUNDS = 3

MAPPINGS = {
    "properties": {
        "number": {"type": "long"},
        "key": {"type": "keyword"},
        "amount": {"type": "integer"},
        "text": {"type": "keyword"},
    }
}

DAG_FILE = f'''
"""The hammer's stream for Airflow: two receivers and a batch every half minute, else defaults.

With documents by key, which are deleted too, batches run one at a time. Otherwise two run at once.
"""

import os

from headrace.dags import stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Limits, SparkSettings, Storage, Stream

MASTER = os.environ.get("HAMMER_SPARK_MASTER")
if JAVA_HOME := os.environ.get("HAMMER_JAVA_HOME"):
    os.environ["JAVA_HOME"] = JAVA_HOME
KEYS = os.environ.get("HAMMER_KEYS")
CLUSTER = {{"spark.cores.max": "4", "spark.executor.cores": "2", "spark.executor.memory": "768m"}}

outputs = [ElasticsearchOutput(connection="elasticsearch_default", index="{INDEX}")]
if KEYS:
    by_key = {{"document_ids": KeyIds(), "transform": "{KEYS_TRANSFORM}:changes"}}
    outputs.append(ElasticsearchOutput(id="keys", connection="elasticsearch_default", index="{KEYS_INDEX}", **by_key))

stream = Stream(
    name="{STREAM}",
    inputs=KafkaInput(connection="kafka_default", topics="{TOPIC}", receivers={RECEIVERS}),
    outputs=outputs,
    batch_interval="30 s",
    limits=Limits(segment_interval="5 s", max_concurrent_batches=1 if KEYS else 2),
    storage=Storage(url=os.environ["HAMMER_STORAGE"], shared=MASTER is not None),
    ledger=os.environ["HAMMER_LEDGER"],
    recover="automatic",
    spark=SparkSettings(master=MASTER, conf=CLUSTER if MASTER else {{}}, py_files=[KEYS] if KEYS else []),
)

receiver, batches = stream_dags(stream)
'''

TRANSFORM_FILE = f'''
"""Makes changes of keys of the hammer's records: a record writes or deletes the document of a key by its offset."""

from pyspark.sql import functions as F


def changes(records):
    offset = F.col("offset")
    key = F.concat_ws("-", "partition", offset % {_KEYS_OF_A_PARTITION})
    deletes = F.floor(offset / {_KEYS_OF_A_PARTITION}) % {_ROUNDS} == {_ROUNDS - 1}
    value = F.when(~deletes, F.struct(offset.alias("offset")))
    return records.select("topic", "partition", "offset", "incarnation", key.alias("key"), value.alias("value"))
'''


def last_documents(places: Iterable[Place]) -> dict[str, dict[str, int]]:
    """The documents that the records at these places leave by `TRANSFORM_FILE`, by key."""
    documents: dict[str, dict[str, int]] = {}
    for place in sorted(places):
        key = f"{place.partition}-{place.offset % _KEYS_OF_A_PARTITION}"
        if place.offset // _KEYS_OF_A_PARTITION % _ROUNDS == _ROUNDS - 1:
            documents.pop(key, None)
        else:
            documents[key] = {"offset": place.offset}
    return documents


# One of this many records is damaged, and belongs in the dead letters.
_EVERY = 200
_DAMAGES = {
    Damage.TRUNCATED: lambda value: value[: len(value) // 2],
    Damage.ARRAY: lambda value: b"[" + value + b"]",
    Damage.TEXT_FOR_NUMBER: lambda value: value.replace(b'"amount":', b'"amount":"x","was":'),
}


@dataclass(frozen=True, slots=True)
class Numbered:
    """A record with its number, counted from 0, in its key, even if its value is damaged."""

    number: int
    value: bytes
    damage: Damage | None = None

    @property
    def key(self) -> bytes:
        """The number as bytes; all keys differ, so partitions get about equally many records."""
        return str(self.number).encode()


def records(seed: int) -> Iterator[Numbered]:
    """An endless series of records; the same seed gives the same records."""
    chance = random.Random(seed)
    number = 0
    while True:
        value = json.dumps(
            {
                "number": number,
                "key": f"{chance.randrange(10_000)}",
                "amount": chance.randrange(1_000_000),
                "text": "höhe " * chance.randrange(1, 20),
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        if number % _EVERY == _EVERY // 2:
            kind = list(_DAMAGES)[number // _EVERY % len(_DAMAGES)]
            yield Numbered(number, _DAMAGES[kind](value), kind)
        else:
            yield Numbered(number, value)
        number += 1
