"""What keeps a stream's log from being deleted, and why.

A stream's numbers, and when it is not well, by the ledger alone.
"""

from __future__ import annotations

from datetime import timedelta

from headrace.batch.allocation import allocate
from headrace.stream_context import StreamContext
from headrace.views.streams import Holder, default_place, stream_detail

from .conftest import INTERVAL_MS, Shop, T

REMEMBERED = "it is remembered for a while (Stream.remember)"
DELETED_NEXT = "the next cleanup deletes it, unless a block in the same segment is still needed"


def held_by(shop: Shop) -> tuple[Holder, ...]:
    return stream_detail(shop.ledger, "shop", default_place("shop", "ledger"), {}).log.held_by


def register(shop: Shop, definition: str) -> None:
    shop.ledger.streams.register("shop", definition, batch_interval_ms=INTERVAL_MS, block_interval_ms=200)


def test_a_batch_that_took_over_many_times_holds_the_log(shop: Shop) -> None:
    """They are more than are shown."""
    for number in range(25):
        shop.store(number)
        shop.clock.advance(INTERVAL_MS)
    shop.beat()
    batch = allocate(StreamContext(shop.stream, shop.ledger), shop.latest(), takes_over=True).batch
    assert len(batch.absorbed) >= 20
    holder = Holder(batch_time_ms=shop.latest(), state="allocated", reason="it is allocated", bytes=batch.payload_bytes)
    assert held_by(shop) == (holder,)


def checkpointed(shop: Shop, definition: str) -> None:
    register(shop, definition)
    shop.store()
    shop.clock.advance(INTERVAL_MS)
    batch_time_ms = shop.latest()
    shop.complete(shop.begin(batch_time_ms))
    register(shop, definition)
    batch = shop.ledger.batches.get("shop", batch_time_ms)
    shop.ledger.batches.mark_checkpointed("shop", [batch.filed("result", shop.ledger.now_ms())])


def test_a_checkpointed_batch_is_held_as_long_as_remembered(shop: Shop) -> None:
    """It is held until the next batch as well."""
    checkpointed(shop, shop.stream.model_copy(update={"remember": timedelta(seconds=60)}).to_json())
    shop.clock.advance(69_000 - shop.clock.now_ms() + shop.latest())
    assert held_by(shop)[0].reason == REMEMBERED
    shop.clock.advance(1_000)
    assert held_by(shop)[0].reason == DELETED_NEXT


def test_an_unreadable_definition_remembers_one_batch_interval(shop: Shop) -> None:
    checkpointed(shop, '{"outputs": []}')
    assert held_by(shop)[0].reason == REMEMBERED
    shop.clock.advance(2 * INTERVAL_MS)
    assert held_by(shop)[0].reason == DELETED_NEXT


def test_a_stream_that_is_well(shop: Shop) -> None:
    summary = shop.summary()
    assert (summary.state, summary.lag, summary.lag_seconds, summary.input_rate) == ("well", 0, 0.0, 12.5)
    assert summary.oldest_unfinished is None
    shop.ledger.streams.set_desired_state("shop", "stopped")
    assert shop.summary().state == "stopped"


def test_a_lag_of_which_a_part_is_unknown_is_not_0_seconds(shop: Shop) -> None:
    shop.beat(total_lag=7, lag_unknown=1, lag_seconds=None)
    summary = shop.summary()
    assert (summary.lag, summary.lag_unknown, summary.lag_seconds) == (7, 1, None)


def test_a_receiver_behind_kafka_makes_the_stream_fall_behind(shop: Shop) -> None:
    """A paused receiver does not."""
    shop.beat(total_lag=10_000, lag_seconds=150.0)
    summary = shop.summary()
    assert (summary.state, summary.reason) == ("falling_behind", "The receivers are 2 min 30 s behind Kafka.")
    shop.beat(paused="the disk is full", total_lag=10_000, lag_seconds=150.0)
    summary = shop.summary()
    assert (summary.state, summary.also) == ("paused", ())
    assert "the disk is full" in summary.reason


def test_an_input_that_is_not_received_stalls_the_stream(shop: Shop) -> None:
    health = {"records": {"asked_ms": T, "error": "Kafka at kafka:9092 cannot be asked", "topics": {}}}
    shop.ledger.jobs.renew(shop.job, attributes={"inputs": health, "troubles": ["rogue is in the group"]})
    summary = shop.summary()
    assert summary.state == "stalled"
    assert "Input records is not received: Kafka at kafka:9092" in summary.reason
    assert summary.also == ("rogue is in the group",)


def test_a_batch_time_that_nobody_runs_stalls_the_stream(shop: Shop) -> None:
    batch_time_ms = shop.store()
    assert shop.summary().oldest_unfinished is None, "its interval is not over"
    shop.clock.advance(40_000)
    summary = shop.summary()
    assert summary.state == "well"
    assert summary.oldest_unfinished is not None
    assert (summary.oldest_unfinished.batch_time_ms, summary.oldest_unfinished.state) == (
        batch_time_ms,
        "not allocated",
    )
    shop.clock.advance(180_000)
    summary = shop.summary()
    assert summary.state == "stalled"
    assert "is not allocated for 3 min 30 s" in summary.reason


def test_no_remedy_says_that_a_dag_is_paused_without_facts(shop: Shop) -> None:
    """The facts are those about the DAGs."""
    shop.store()
    shop.clock.advance(220_000)
    remedy = shop.summary().remedy
    assert remedy == (
        "Look at the stream's batch DAG in Airflow (shop_batches, unless it has another id): is it unpaused, and does "
        "it run?"
    )
    shop.ledger.jobs.release(shop.job)
    shop.complete(shop.begin(shop.latest()))
    summary = shop.summary()
    assert summary.reason.startswith("The stream is not received: no receiver is alive")
    assert "A run of the receiver DAG starts the receiver job" in (summary.remedy or "")
    assert "(shop_receiver, unless it has another id)" in (summary.remedy or "")


def test_the_delays_are_of_the_last_completed_batch(shop: Shop) -> None:
    shop.clock.advance(INTERVAL_MS + 500)
    attempt = shop.begin(T + INTERVAL_MS)
    shop.clock.advance(2_000)
    shop.complete(attempt)
    last = shop.summary().last_completed_batch
    assert last is not None
    assert (last.scheduling_delay, last.total_delay) == (0.5, 2.5)
