"""Runs the main example: 336,776 flights from Kafka to Elasticsearch, and the proof."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.flights import FLIGHTS, flight_records
from examples.demo.following import follow, unpause
from examples.demo.kafka_side import read_topic
from examples.demo.observing import Observer
from examples.demo.producing import Producing, create_topic
from examples.demo.proof import prove
from examples.demo.report import Report
from examples.demo.timings import read_timings

if TYPE_CHECKING:
    from examples.demo.stack import DemoStack
    from examples.demo.view import View

STREAM = TOPIC = INDEX = "flights"
PARTITIONS = 4

_INTEGERS = (
    "year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance hour "
    "minute"
)
# Explicit, so that mapping conflicts do not depend on which flight comes first.
MAPPINGS: dict[str, Any] = {
    "properties": {
        **{name: {"type": "integer"} for name in _INTEGERS.split()},
        **{name: {"type": "keyword"} for name in ("carrier", "tailnum", "origin", "dest")},
        "time_hour": {"type": "date"},
    }
}


@dataclass(slots=True)
class Stopwatch:
    """Measures the seconds of each part of the demo."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def over(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - began, 1)


def run_flights(stack: DemoStack, view: View, *, records: int | None, rate: float | None, watch: Stopwatch) -> Report:
    """Produce, wait until all is processed, prove. The stack must be running.

    Raises:
        DemoError: nothing moved for three minutes, or a part of the stack failed.
    """
    from headrace.ledger import Ledger

    kafka, elasticsearch = stack.address("kafka"), ElasticsearchSide(stack.address("elasticsearch"))
    to_produce = FLIGHTS if records is None else min(records, FLIGHTS)
    create_topic(kafka, TOPIC, PARTITIONS)
    elasticsearch.create_index(INDEX, MAPPINGS)
    producing = Producing(kafka, TOPIC, flight_records(to_produce), rate=rate)
    try:
        with Ledger.open(stack.ledger_url) as ledger:
            observer = Observer(
                STREAM,
                ledger=ledger,
                to_produce=to_produce,
                produced=producing.so_far,
                elasticsearch=elasticsearch,
                index=INDEX,
            )
            # With an earlier start of the producer the first batch would hold nearly all records; with an earlier start
            # of the batches the first ones would be empty.
            with watch.over("start of the receiver job"):
                unpause(stack, view, f"{STREAM}_receiver")
                follow(stack, view, STREAM, observer, until=lambda snapshot: snapshot.receiving == "running")
            with watch.over("from the first record to the last cleanup"):
                unpause(stack, view, f"{STREAM}_batches")
                pace = "as fast as it goes" if rate is None else f"{rate:,.0f} a second"
                view.say(f"producing {to_produce:,} flights into the topic {TOPIC}, {PARTITIONS} partitions, {pace}")
                producing.start()
                last = follow(stack, view, STREAM, observer, until=lambda snapshot: snapshot.settled)
    finally:
        producing.stop()
    view.say("everything is indexed, checkpointed and cleaned up; now the proof")
    with watch.over("proof"):
        again = read_topic(kafka, TOPIC)
        proof = prove(
            produced=producing.delivered,
            held=again.held,
            records=again.values,
            malformed=producing.malformed.keys(),
            documents=elasticsearch.documents(INDEX),
            dead_letters=elasticsearch.dead_letters(f"{INDEX}-dead-letters"),
        )
    return Report(
        proof=proof,
        malformed=Counter(damage.value for damage in producing.malformed.values()),
        batches=len(last.with_records),
        timings=read_timings(stack.airflow(), f"{STREAM}_batches", last.with_records),
        seconds=watch.seconds,
    )
