"""What keeps a stream's log from being deleted, and why."""

from __future__ import annotations

from datetime import timedelta

from headrace.batch.allocation import allocate
from headrace.stream_context import StreamContext
from headrace.views.streams import Holder, default_place, stream_detail

from .conftest import INTERVAL_MS, Shop

REMEMBERED = "it is remembered for a while (Stream.remember)"
DELETED_NEXT = "the next cleanup deletes it, unless a block in the same segment is still needed"


def held_by(shop: Shop) -> tuple[Holder, ...]:
    return stream_detail(shop.ledger, "shop", default_place("shop", "ledger"), {}).log.held_by


def register(shop: Shop, definition: str) -> None:
    shop.ledger.streams.register("shop", definition, batch_interval_ms=INTERVAL_MS, block_interval_ms=200)


def test_a_batch_that_took_over_more_batch_times_than_are_shown_holds_the_log(shop: Shop) -> None:
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
    shop.ledger.batches.mark_checkpointed("shop", batch_time_ms, "checkpoint")


def test_a_checkpointed_batch_is_held_as_long_as_its_stream_remembers_it_and_until_the_next_batch(shop: Shop) -> None:
    checkpointed(shop, shop.stream.model_copy(update={"remember": timedelta(seconds=60)}).to_json())
    shop.clock.advance(69_000 - shop.clock.now_ms() + shop.latest())
    assert held_by(shop)[0].reason == REMEMBERED
    shop.clock.advance(1_000)
    assert held_by(shop)[0].reason == DELETED_NEXT


def test_a_definition_that_cannot_be_read_counts_as_remembering_one_batch_interval(shop: Shop) -> None:
    checkpointed(shop, '{"outputs": []}')
    assert held_by(shop)[0].reason == REMEMBERED
    shop.clock.advance(2 * INTERVAL_MS)
    assert held_by(shop)[0].reason == DELETED_NEXT
