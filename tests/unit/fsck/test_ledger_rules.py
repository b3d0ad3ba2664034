"""Each rule of `tests.support.ledger_rules` is broken, and named. What headrace does breaks none: see test_healthy."""

from __future__ import annotations

import pytest
from tests.support.ledger_rules import RULES, broken_rules

from headrace.clock import time_text

from .conftest import STREAM, TIMES, Shop

CLICKS_0, CLICKS_1 = "clicks/clicks-0", "clicks/clicks-1"
T1, T2, T3, T4 = (time_text(time) for time in TIMES[:4])


def broken(shop: Shop) -> list[tuple[str, str]]:
    return [(one.rule, one.subject) for one in broken_rules(shop.ledger, STREAM)]


def test_a_stream_in_all_states_keeps_the_rules(shop: Shop) -> None:
    assert broken(shop) == []
    assert len(RULES) == 11


BY_SQL: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "latest batch time lost": (
        "UPDATE positions SET last_batch_time_ms = 0 WHERE partition = 0",
        [("position_wrong", CLICKS_0)],
    ),
    "block lost of no batch": (
        "DELETE FROM blocks WHERE block_id = 5",
        [("unclaimed_wrong", T4)],
    ),
    "block of another batch": (
        f"UPDATE blocks SET batch_time_ms = {TIMES[2]} WHERE block_id = 2",
        [("batch_blocks_wrong", T3)],
    ),
    "block before its time": (
        f"UPDATE blocks SET batch_time_ms = {TIMES[1]} WHERE block_id = 5",
        [("batch_time_wrong", "block 5"), ("batch_time_wrong", "block 5"), ("unclaimed_wrong", T4)],
    ),
    "no batch time": (
        "UPDATE blocks SET batch_time_ms = batch_time_ms + 1 WHERE block_id = 5",
        [("batch_time_wrong", "block 5"), ("unclaimed_wrong", T4)],
    ),
    "block of no receiver": (
        "UPDATE receivers SET epoch = 1",
        [("block_wrong", "block 3"), ("segment_wrong", "")],
    ),
    "block after the last": (
        "UPDATE receivers SET last_accepted_sequence = 1",
        [("block_wrong", "block 5")],
    ),
    "records of a block": (
        "UPDATE blocks SET records = 7 WHERE block_id = 5",
        [("block_wrong", "block 5")],
    ),
    "unclaimed forgotten": (
        "DELETE FROM unclaimed_times",
        [("unclaimed_wrong", T4)],
    ),
    "unclaimed invented": (
        f"INSERT INTO unclaimed_times VALUES ('{STREAM}', {TIMES[5]}, 1, 1, 1, 0)",
        [("unclaimed_wrong", time_text(TIMES[5]))],
    ),
    "segment of another epoch": (
        "UPDATE segments SET epoch = 9 WHERE segment_id = 2",
        [("segment_wrong", "")],
    ),
    "segment removed with blocks": (
        "UPDATE segments SET removed_at_ms = 1 WHERE segment_id = 1",
        [("segment_wrong", "")],
    ),
    "segment too short": (
        "UPDATE segments SET bytes = 10 WHERE segment_id = 1",
        [("segment_wrong", "")],
    ),
    "segment closed too early": (
        "UPDATE segments SET last_batch_time_ms = 0 WHERE segment_id = 1",
        [("segment_wrong", "")],
    ),
    "batch records": (
        f"UPDATE batches SET records = records + 1 WHERE batch_time_ms = {TIMES[1]}",
        [("batch_blocks_wrong", T2)],
    ),
    "batch blocks": (
        f"UPDATE batches SET blocks = 0 WHERE batch_time_ms = {TIMES[1]}",
        [("batch_blocks_wrong", T2)],
    ),
    "batch inputs": (
        f"UPDATE batch_inputs SET until_offset = until_offset + 1 WHERE batch_time_ms = {TIMES[1]} AND partition = 0",
        [("batch_inputs_wrong", T2)],
    ),
    "batch interval": (
        f"UPDATE batches SET interval_ms = 7000 WHERE batch_time_ms = {TIMES[1]}",
        [("batch_time_wrong", T2)],
    ),
    "not sealed": (
        "UPDATE streams SET sealed_until_ms = 0",
        [("batch_time_wrong", T1)],
    ),
    "abandoned without a gap": (
        f"UPDATE batches SET state = 'abandoned' WHERE batch_time_ms = {TIMES[1]}",
        [("gap_missing", f"{CLICKS_0} at 3"), ("gap_missing", f"{CLICKS_1} at 2")],
    ),
    "absorbed by nobody": (
        f"UPDATE batches SET absorbed_by_ms = {TIMES[2]} WHERE batch_time_ms = {TIMES[1]}",
        [("absorbed_wrong", T2), ("batch_blocks_wrong", T3)],
    ),
    "absorbs what is not absorbed": (
        f"UPDATE batches SET absorbed = '[{TIMES[1]}]' WHERE batch_time_ms = {TIMES[2]}",
        [("absorbed_wrong", T3)],
    ),
    "job of the future": (
        "UPDATE streams SET job_epoch = 0",
        [("lease_wrong", "receiver job 1")],
    ),
    "job ended": (
        "UPDATE receiver_jobs SET state = 'failed'",
        [("lease_wrong", f"receiver {STREAM}/clicks/0")],
    ),
    "partition that the topic has not": (
        "UPDATE topics SET partitions = 1",
        [("topic_wrong", CLICKS_1)],
    ),
}


@pytest.mark.parametrize("harm", BY_SQL)
def test_a_ledger_that_was_changed_breaks_a_rule(shop: Shop, harm: str) -> None:
    statement, expected = BY_SQL[harm]
    shop.sql(statement)
    found = broken(shop)
    for rule, subject in expected:
        assert any(rule == name and subject in of for name, of in found), found


def test_a_block_that_is_there_twice_breaks_rules(shop: Shop) -> None:
    shop.copy_row("blocks", "block_id = 5", block_id=99, sequence=90, frame_offset=100_000)
    assert {("block_wrong", "block 99"), ("unclaimed_wrong", T4)} <= set(broken(shop))


def test_a_cleaned_batch_with_blocks_breaks_a_rule(shop: Shop) -> None:
    shop.sql(f"UPDATE batches SET cleaned_at_ms = 1 WHERE batch_time_ms = {TIMES[1]}")
    assert broken(shop) == [("batch_blocks_wrong", T2)]


def test_blocks_that_overlap_in_the_log_break_a_rule(shop: Shop) -> None:
    shop.sql("UPDATE blocks SET frame_length = frame_length + 1 WHERE block_id = 1")
    (found,) = broken_rules(shop.ledger, STREAM)
    assert (found.rule, "overlap" in found.detail) == ("segment_wrong", True)


def test_a_batch_time_before_that_of_earlier_offsets_is_wrong(shop: Shop) -> None:
    shop.sql(f"UPDATE blocks SET batch_time_ms = {TIMES[50]} WHERE block_id = 1")
    assert ("batch_time_wrong", "block 2") in broken(shop)


def test_two_current_topics_of_a_name_break_a_rule(shop: Shop) -> None:
    shop.copy_row("topics", "topic_id = 'id-1'", topic_id="id-9", incarnation=9)
    assert broken(shop) == [("topic_wrong", "clicks/clicks")]


def test_two_attempts_at_an_output_break_a_rule(shop: Shop) -> None:
    shop.begin(TIMES[2])
    assert broken(shop) == []
    shop.copy_row("batch_attempts", f"batch_time_ms = {TIMES[2]}", number=7)
    assert ("lease_wrong", f"batch {T3}") in broken(shop)


def test_a_running_attempt_whose_output_was_taken_breaks_a_rule(shop: Shop) -> None:
    shop.begin(TIMES[2])
    shop.sql(f"UPDATE batch_outputs SET attempt = 9 WHERE batch_time_ms = {TIMES[2]}")
    assert ("lease_wrong", f"batch {T3}") in broken(shop)


def test_more_batches_than_slots_break_a_rule(shop: Shop) -> None:
    shop.begin(TIMES[2])
    shop.sql(f"UPDATE batch_attempts SET state = 'running', lease_until_ms = {TIMES[50]}")
    assert ("slots_exceeded", STREAM) in broken(shop)


def test_a_receiver_of_a_job_that_never_was_breaks_a_rule(shop: Shop) -> None:
    shop.sql("UPDATE receivers SET job_epoch = 9")
    assert broken(shop) == [("lease_wrong", f"receiver {STREAM}/clicks/0")]


@pytest.mark.parametrize("time_ms", [TIMES[0], TIMES[60]], ids=["of a batch that completed", "of no batch"])
def test_a_gap_of_a_batch_that_was_not_abandoned_breaks_a_rule(shop: Shop, time_ms: int) -> None:
    shop.ledger.batches.abandon(STREAM, TIMES[1], "no use")
    assert broken(shop) == []
    shop.sql(f"UPDATE gaps SET batch_time_ms = {time_ms}")
    assert ("gap_wrong", time_text(time_ms)) in broken(shop)
