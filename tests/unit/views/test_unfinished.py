"""Batches that are not completed: which one is due longest, since when, and with which error."""

from __future__ import annotations

import pytest

from headrace.clock import time_text
from headrace.errors import WARNING
from headrace.views.batches import last_error
from headrace.views.stream_state import DagFacts
from headrace.views.streams import default_place, summarize

from .conftest import INTERVAL_MS, Shop, T

FIRST = T + INTERVAL_MS
WEEK_MS = 7 * 86_400_000


@pytest.fixture
def old(shop: Shop) -> Shop:
    """A batch that failed once, then completed, a week ago; and one that has completed now."""
    shop.clock.advance(INTERVAL_MS)
    shop.ledger.attempts.fail(shop.begin(FIRST), "the index is read-only")
    shop.complete(shop.begin(FIRST))
    shop.clock.advance(WEEK_MS)
    shop.complete(shop.begin(shop.latest()))
    return shop


def test_a_batch_that_fails_is_the_oldest_with_its_error(shop: Shop) -> None:
    """It is so even while the batch is tried again."""
    shop.store()
    shop.clock.advance(15_000)
    shop.ledger.attempts.fail(shop.begin(FIRST), "the index is read-only")
    again = shop.begin(FIRST)
    batch = shop.ledger.batches.get("shop", FIRST)
    assert (batch.state.value, batch.error) == ("running", None)
    assert last_error(shop.ledger, batch) == "the index is read-only"
    summary = shop.summary()
    assert summary.state == "failing"
    assert summary.oldest_unfinished is not None
    assert summary.oldest_unfinished.error == "the index is read-only"
    shop.ledger.attempts.renew(again, attributes={WARNING: "Elasticsearch does not answer"})
    assert last_error(shop.ledger, batch) == "Elasticsearch does not answer"


def test_a_completed_batch_run_again_is_late_only_since_then(old: Shop) -> None:
    """It is late only since it was begun again."""
    old.begin(FIRST, force=True)
    summary = old.summary()
    assert (summary.state, summary.also) == ("well", ())
    oldest = summary.oldest_unfinished
    assert oldest is not None
    assert (oldest.batch_time_ms, oldest.state, oldest.error, oldest.age) == (FIRST, "running", None, 0)
    old.clock.advance(61_000)
    old.complete(old.begin(old.latest()))
    summary = old.summary()
    assert summary.state == "falling_behind"
    assert "had completed before, and is being run again for 1 min 1 s" in summary.reason


def test_only_errors_since_a_completed_batch_was_rerun_count(old: Shop) -> None:
    attempt = old.begin(FIRST, force=True)
    assert last_error(old.ledger, old.ledger.batches.get("shop", FIRST)) is None
    begun_ms = old.clock.now_ms()
    old.clock.advance(5_000)
    old.ledger.attempts.fail(attempt, "the mapping conflicts")
    summary = old.summary()
    assert summary.state == "failing"
    assert summary.since_ms == begun_ms + 5_000
    assert "had completed before. Begun again, it failed, first at" in summary.reason
    assert "the mapping conflicts" in summary.reason
    assert "abandon" not in (summary.remedy or ""), "the ledger refuses to abandon it"
    assert "the repair does not try it again" in (summary.remedy or "")
    old.clock.advance(5_000)
    again = old.begin(FIRST)
    summary = old.summary()
    assert "is being run again; before, it failed, first at" in summary.reason
    assert summary.oldest_unfinished is not None
    assert (summary.oldest_unfinished.age, summary.oldest_unfinished.error) == (10, "the mapping conflicts")
    old.complete(again)
    assert old.summary().state == "well"


def test_a_rerun_batch_without_events_is_late_since_its_last_try(old: Shop) -> None:
    old.ledger.attempts.fail(old.begin(FIRST, force=True), "the mapping conflicts")
    old.clock.advance(5_000)
    old.begin(FIRST)
    old.ledger.events.prune("shop", old.clock.now_ms() + 1)
    oldest = old.summary().oldest_unfinished
    assert oldest is not None
    assert (oldest.age, oldest.error) == (0, None)


def test_a_batch_that_is_run_again_does_not_hide_one_that_fails(old: Shop) -> None:
    old.begin(FIRST, force=True)
    old.clock.advance(INTERVAL_MS)
    old.ledger.attempts.fail(old.begin(old.latest()), "the index is full")
    summary = old.summary()
    assert (summary.state, "the index is full" in summary.reason) == ("failing", True)


def test_records_that_wait_longer_than_a_rerun_are_the_oldest(old: Shop) -> None:
    """They have waited for longer than the old batch is run again."""
    waiting_ms = old.store()
    old.clock.advance(2 * INTERVAL_MS)
    old.begin(FIRST, force=True)
    oldest = old.summary().oldest_unfinished
    assert oldest is not None
    assert (oldest.batch_time_ms, oldest.state) == (waiting_ms, "not allocated")


def test_of_batches_run_again_the_first_begun_is_judged(old: Shop) -> None:
    newer = old.latest()
    old.ledger.attempts.fail(old.begin(newer, force=True), "the mapping conflicts")
    old.clock.advance(5_000)
    old.begin(FIRST, force=True)
    oldest = old.summary().oldest_unfinished
    assert oldest is not None
    assert oldest.batch_time_ms == newer


def test_a_batch_run_again_in_another_stream_changes_nothing(old: Shop) -> None:
    """The other stream is one of the same ledger."""
    old.begin(FIRST - INTERVAL_MS, stream="other")
    old.clock.advance(5_000)
    old.begin(FIRST, force=True)
    rows = {row.name: row for row in old.ledger.streams.all()}
    overviews = old.ledger.overviews.of([rows["other"], rows["shop"]], 30)
    times = {each.stream.name: each.backfilled and each.backfilled.batch_time_ms for each in overviews}
    assert times == {"other": FIRST - INTERVAL_MS, "shop": FIRST}


def test_a_batch_from_before_the_stream_is_late_from_allocation(shop: Shop) -> None:
    shop.begin(T - WEEK_MS)
    summary = shop.summary()
    assert (summary.state, summary.oldest_unfinished and summary.oldest_unfinished.age) == ("well", 0)


def test_errors_of_a_replay_do_not_count(old: Shop) -> None:
    old.begin(FIRST, force=True)
    replay = old.ledger.replays.begin(
        "shop", FIRST, target="copy", definition=old.stream.to_json(), outputs=["console"],
        holder="test", way="connect", lease_ms=60_000,
    )  # fmt: skip
    old.ledger.attempts.fail(replay, "the copy's index is read-only")
    assert last_error(old.ledger, old.ledger.batches.get("shop", FIRST)) is None
    assert old.summary().state == "well"


def test_a_paused_batch_dag_delays_only_never_completed_batches(old: Shop) -> None:
    """Records wait only for batches that never completed."""
    paused = {"shop_batches": DagFacts("shop_batches", paused=True)}

    def reason() -> str:
        row, place = old.ledger.streams.get("shop"), default_place("shop", "ledger")
        return summarize(old.ledger, row, place, paused).reason

    old.begin(FIRST, force=True)
    assert reason() == "The DAG shop_batches is paused in Airflow, so no batch is run."
    waiting_ms = old.store()
    old.clock.advance(2 * INTERVAL_MS)
    assert f"no batch is run; records wait since batch time {time_text(waiting_ms)}." in reason()
