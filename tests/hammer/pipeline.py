"""The stream that is hammered, as a user would write it, and the records that go through it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from examples.demo.damage import Damage

STREAM = TOPIC = INDEX = "hammer"
PARTITIONS = 4
RECEIVERS = 2
DEAD_LETTERS = f"{INDEX}-dead-letters"

MAPPINGS = {
    "properties": {
        "number": {"type": "long"},
        "key": {"type": "keyword"},
        "amount": {"type": "integer"},
        "text": {"type": "keyword"},
    }
}

DAG_FILE = f'''
"""The hammer's stream for Airflow: two receivers, a batch every half minute and two at once, else defaults."""

import os

from headrace.dags import stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, Limits, SparkSettings, Storage, Stream

MASTER = os.environ.get("HAMMER_SPARK_MASTER")
CLUSTER = {{"spark.cores.max": "4", "spark.executor.cores": "2", "spark.executor.memory": "768m"}}

stream = Stream(
    name="{STREAM}",
    inputs=KafkaInput(connection="kafka_default", topics="{TOPIC}", receivers={RECEIVERS}),
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="{INDEX}"),
    batch_interval="30 s",
    limits=Limits(segment_interval="5 s", max_concurrent_batches=2),
    storage=Storage(url=os.environ["HAMMER_STORAGE"], shared=MASTER is not None),
    ledger=os.environ["HAMMER_LEDGER"],
    spark=SparkSettings(master=MASTER, conf=CLUSTER if MASTER else {{}}),
)

receiver, batches = stream_dags(stream)
'''

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
