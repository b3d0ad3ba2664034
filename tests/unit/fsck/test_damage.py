"""Each rule is broken, in the ledger or on the disk, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.ledger_rules import broken_rules

from headrace.batch.manifest import decode_document, encode_document
from headrace.batch.results import result_path
from headrace.clock import time_text
from headrace.fsck.findings import MEANINGS, Problem

from .conftest import INTERVAL_MS, STREAM, TIMES, Shop

CLICKS_0, CLICKS_1 = "clicks/clicks-0", "clicks/clicks-1"
T1, T2, T3, T4 = (time_text(time) for time in TIMES[:4])


def test_a_stream_in_all_states_has_no_findings(shop: Shop) -> None:
    report = shop.check()
    assert (report.findings, report.notes, report.unchecked) == ([], [], [])
    assert report.checked == {
        "blocks": 5, "batches": 3, "partitions": 2, "segments": 2, "frames": 5, "manifests": 3,
    }  # fmt: skip


def test_every_problem_says_what_it_means_and_what_to_do() -> None:
    assert set(MEANINGS) == set(Problem)
    assert all(meaning and remedy for meaning, remedy in MEANINGS.values())


BY_SQL: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "position back": (
        "UPDATE positions SET next_offset = next_offset - 1 WHERE partition = 0",
        [("position_wrong", CLICKS_0)],
    ),
    "starting offset beyond": (
        "UPDATE positions SET starting_offset = 1 WHERE partition = 1",
        [("offsets_twice", f"{CLICKS_1} at 0")],
    ),
    "position lost": (
        "DELETE FROM positions WHERE partition = 1",
        [("position_wrong", CLICKS_1)],
    ),
    "block lost of a batch": (
        "DELETE FROM blocks WHERE block_id = 2",
        [("cleaned_too_early", T2)],
    ),
    "block of another batch": (
        f"UPDATE blocks SET batch_time_ms = {TIMES[2]} WHERE block_id = 2",
        [("cleaned_too_early", T2)],
    ),
    "segment let go early": (
        "UPDATE segments SET removing_at_ms = 1 WHERE segment_id = 1",
        [("cleaned_too_early", T2)],
    ),
    "batch records": (
        f"UPDATE batches SET records = records + 1 WHERE batch_time_ms = {TIMES[1]}",
        [("manifest_differs", T2)],
    ),
    "batch blocks": (
        f"UPDATE batches SET blocks = 0 WHERE batch_time_ms = {TIMES[1]}",
        [("manifest_differs", T2)],
    ),
    "batch inputs": (
        f"UPDATE batch_inputs SET until_offset = until_offset + 1 WHERE batch_time_ms = {TIMES[1]} AND partition = 0",
        [("manifest_differs", T2)],
    ),
    "batch interval": (
        f"UPDATE batches SET interval_ms = 7000 WHERE batch_time_ms = {TIMES[1]}",
        [("manifest_differs", T2)],
    ),
    "not sealed": (
        "UPDATE streams SET sealed_until_ms = 0",
        [("ledger_set_back", STREAM)],
    ),
    "completed without a record": (
        f"DELETE FROM batch_outputs WHERE batch_time_ms = {TIMES[0]}",
        [("batch_state_wrong", T1)],
    ),
    "running without an attempt": (
        f"UPDATE batches SET state = 'running' WHERE batch_time_ms = {TIMES[2]}",
        [("batch_state_wrong", T3)],
    ),
    "failed and recorded": (
        f"UPDATE batch_outputs SET state = 'completed' WHERE batch_time_ms = {TIMES[1]}",
        [("batch_state_wrong", T2)],
    ),
    "never completed and checkpointed": (
        f"UPDATE batches SET checkpointed_at_ms = 1 WHERE batch_time_ms = {TIMES[1]}",
        [("batch_state_wrong", T2)],
    ),
    "attempt lost": (
        f"UPDATE batches SET attempt = 0 WHERE batch_time_ms = {TIMES[1]}",
        [("batch_state_wrong", T2)],
    ),
    "cleaned and not done": (
        f"UPDATE batches SET cleaned_at_ms = 1 WHERE batch_time_ms = {TIMES[1]}",
        [("cleaned_too_early", T2)],
    ),
    "absorbed by nobody": (
        f"UPDATE batches SET absorbed_by_ms = {TIMES[2]} WHERE batch_time_ms = {TIMES[1]}",
        [("cleaned_too_early", T2)],
    ),
    "job of the future": (
        "UPDATE streams SET job_epoch = 0",
        [("ledger_set_back", STREAM)],
    ),
}


@pytest.mark.parametrize("harm", BY_SQL)
def test_a_ledger_that_was_changed_is_noticed(shop: Shop, harm: str) -> None:
    statement, expected = BY_SQL[harm]
    shop.sql(statement)
    problems = shop.problems()
    for problem, subject in expected:
        assert any(reported == problem and subject in of for reported, of in problems), problems


def test_a_block_that_is_there_twice_is_noticed(shop: Shop) -> None:
    shop.copy_row("blocks", "block_id = 5", block_id=99, sequence=90, frame_offset=100_000)
    problems = shop.problems()
    assert ("offsets_twice", f"{CLICKS_0} at 13") in problems
    assert ("offsets_twice", f"{CLICKS_1} at 6") in problems


def test_an_attempt_at_a_batch_that_is_over_is_noticed(shop: Shop) -> None:
    # Its records are of another attempt: otherwise it has only died after the last of them.
    shop.sql(f"UPDATE batch_attempts SET state = 'running', number = number + 7 WHERE batch_time_ms = {TIMES[0]}")
    assert ("batch_state_wrong", T1) in shop.problems()


def test_a_batch_out_of_turn_is_noticed(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(ordered=True)
    for _ in range(3):
        shop.store()
        shop.clock.advance(INTERVAL_MS)
    shop.run(TIMES[0])
    shop.allocate(TIMES[1])
    shop.clock.advance(1)
    shop.allocate(TIMES[2])
    shop.sql("UPDATE streams SET ordered = 0")
    shop.complete(TIMES[2])
    shop.sql("UPDATE streams SET ordered = 1")
    assert shop.problems() == [("out_of_turn", T2)]


def test_an_earlier_time_without_a_batch_is_out_of_turn_too(make_shop: Callable[..., Shop]) -> None:
    shop = make_shop(ordered=True)
    for _ in range(2):
        shop.store()
        shop.clock.advance(INTERVAL_MS)
    shop.sql("UPDATE streams SET ordered = 0")
    shop.run(TIMES[1])
    shop.sql("UPDATE streams SET ordered = 1")
    assert shop.problems() == [("out_of_turn", T1)]


def test_a_batch_built_over_what_was_received_is_noticed(shop: Shop) -> None:
    shop.clock.advance(INTERVAL_MS)
    shop.allocate(TIMES[3])
    shop.sql(f"UPDATE batches SET built = 1, blocks = 0 WHERE batch_time_ms = {TIMES[3]}")
    assert ("offsets_twice", f"{CLICKS_0} at 13") in shop.problems()


def test_a_replay_that_has_not_written_is_noticed(shop: Shop) -> None:
    shop.replay(TIMES[0])
    assert shop.problems() == []
    shop.sql("DELETE FROM batch_outputs WHERE target = 'copy'")
    assert shop.problems() == [("replay_state_wrong", f"copy {T1}")]


def test_offsets_that_nothing_accounts_for_are_a_note(shop: Shop) -> None:
    """Only Kafka can say what was at those offsets."""
    shop.sql("UPDATE positions SET next_offset = next_offset + 5 WHERE partition = 0")
    report = shop.check()
    assert report.findings == []
    assert "1 ranges of 5 offsets" in report.notes[0]
    assert f"{CLICKS_0} [16, 21)" in report.notes[0]


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_segment_that_is_gone_is_noticed(shop: Shop) -> None:
    gone = shop.segments()[0]
    shop.log_path(gone.removeprefix("log/")).unlink()
    report = shop.check()
    assert [(f.problem, f.subject) for f in report.findings] == [(Problem.SEGMENT_MISSING, gone.removeprefix("log/"))]
    assert "clicks-0[0, 3)" in report.findings[0].detail


def test_a_block_that_cannot_be_read_is_noticed(shop: Shop) -> None:
    path = shop.segments()[1].removeprefix("log/")
    block = shop.ledger.allocations.blocks_of(STREAM, TIMES[2])[0]
    file = shop.log_path(path)
    data = bytearray(file.read_bytes())
    data[block.info.handle.offset + block.info.handle.length - 3] ^= 1
    file.write_bytes(data)
    (finding,) = shop.check().findings
    assert finding.problem is Problem.BLOCK_UNREADABLE
    assert f"block {block.block_id} at {path}:{block.info.handle.offset}" == finding.subject
    assert "checksum" in finding.detail
    assert T3 in finding.detail


def test_damage_where_no_block_stands_is_noticed(shop: Shop) -> None:
    path = shop.segments()[1].removeprefix("log/")
    file = shop.log_path(path)
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)
    assert ("log_damaged", f"{path}:0") in shop.problems()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("records", "records - 1"),
        ("cut_time_ms", "cut_time_ms - 1"),
        ("sequence", "sequence + 5"),
        ("frame_length", "frame_length - 1"),
        ("ranges", "replace(ranges, ',13,16,', ',13,17,')"),
    ],
)
def test_a_block_that_is_another_than_the_ledger_says_is_noticed(shop: Shop, column: str, value: str) -> None:
    shop.sql(f"UPDATE blocks SET {column} = {value} WHERE block_id = 5")
    (finding,) = [f for f in shop.check().findings if f.problem is Problem.BLOCK_DIFFERS]
    assert finding.subject.startswith("block 5 at ")


def test_a_ledger_that_was_set_back_is_noticed(shop: Shop) -> None:
    shop.ledger.close()
    file = shop.ledger_file
    old = file.read_bytes()
    ledger = shop.ledger
    shop.clock.advance(INTERVAL_MS)
    shop.store()
    shop.store()
    shop.run(TIMES[3])
    ledger.close()
    file.write_bytes(old)
    problems = shop.problems()
    assert ("ledger_set_back", CLICKS_0) in problems
    assert ("ledger_set_back", T4) in problems
    assert any(problem == "block_unknown" for problem, _ in problems)


def test_a_frame_that_was_never_accepted_is_no_finding(shop: Shop) -> None:
    shop.write({0: 3})
    assert shop.problems() == []
    shop.new_epoch()
    shop.store()
    assert shop.problems() == []


def test_a_file_that_came_back_is_noticed(shop: Shop) -> None:
    shop.complete(TIMES[1])
    shop.checkpoint(TIMES[1])
    path = shop.segments()[0].removeprefix("log/")
    data = shop.log_path(path).read_bytes()
    shop.clock.advance(10 * INTERVAL_MS)
    assert shop.clean().segments == 1
    assert shop.problems() == []
    shop.log_path(path).write_bytes(data)
    assert shop.problems() == [("segment_returned", path)]


def test_a_manifest_that_is_gone_or_damaged_is_noticed(shop: Shop) -> None:
    path = f"manifests/{TIMES[2]}.json"
    data = shop.folder.read(path)
    shop.folder.write_atomically(path, data.replace(b'"version"', b'"Version"'))
    assert shop.problems() == [("manifest_damaged", T3)]
    # Whole, and not the one that the ledger names.
    shop.folder.write_atomically(path, encode_document(decode_document(data) | {"more": 1}))
    assert shop.problems() == [("manifest_damaged", T3)]
    shop.folder.delete(path)
    assert shop.problems() == [("manifest_missing", T3)]
    shop.allocate(TIMES[2])
    assert shop.problems() == []


def test_a_checkpoint_that_is_damaged_or_gone_is_noticed(shop: Shop) -> None:
    shop.complete(TIMES[1])
    shop.clock.advance(1)
    shop.checkpoint(TIMES[1])
    old, new = shop.folder.paths("checkpoints")
    data = shop.folder.read(new)
    shop.folder.write_atomically(new, data[:-20])
    assert shop.problems() == [("checkpoint_unreadable", new)]
    shop.folder.delete(new)
    shop.folder.delete(old)
    assert shop.problems() == [("checkpoint_unreadable", "checkpoints")]


def test_a_result_that_is_damaged_or_gone_is_noticed(shop: Shop) -> None:
    shop.complete(TIMES[1])
    shop.checkpoint(TIMES[1])
    batch = shop.ledger.batches.get(STREAM, TIMES[1])
    path = result_path(TIMES[1], batch.result)
    assert shop.problems() == []
    data = shop.folder.read(path)
    shop.folder.write_atomically(path, data[:-5])
    assert shop.problems() == [("result_unreadable", T2)]
    shop.folder.delete(path)
    assert shop.problems() == [("result_unreadable", T2)]
    # The ledger was set back to before the batch's last changes.
    shop.folder.write_atomically(path, data)
    shop.folder.write_atomically(result_path(TIMES[1], batch.change + 1), data)
    assert shop.problems() == [("ledger_set_back", T2)]


def test_a_batch_that_has_changed_since_its_result_is_no_problem(shop: Shop) -> None:
    shop.complete(TIMES[1])
    shop.checkpoint(TIMES[1])
    shop.replay(TIMES[1])
    assert shop.problems() == []


def test_storage_that_cannot_be_read_is_not_a_clean_bill(shop: Shop) -> None:
    shop.sql("""UPDATE streams SET definition = replace(definition, '"url":"', '"url":"nosuch:/')""")
    report = shop.check()
    assert report.findings == []
    assert "nosuch" in report.unchecked[0]


def test_records_ahead_of_the_clock_are_reported_till_taken_back(shop: Shop) -> None:
    shop.clock.advance(600_000)
    shop.store()
    shop.clock.set_back(600_000)
    ahead = [finding.problem for finding in shop.check().findings]
    assert ahead == [Problem.CLOCK_WAS_AHEAD]
    assert shop.ledger.clock_corrections.apply(STREAM) is not None
    shop.store()
    assert shop.check().findings == []


def test_a_batch_allocated_ahead_of_the_clock_is_reported(shop: Shop) -> None:
    shop.clock.advance(600_000)
    shop.ledger.allocations.seal(STREAM, shop.clock.now_ms() // INTERVAL_MS * INTERVAL_MS)
    shop.clock.set_back(600_000)
    assert [finding.problem for finding in shop.check().findings] == [Problem.CLOCK_WAS_AHEAD]


def test_a_stream_reopened_after_a_clock_ahead_has_nothing_wrong(shop: Shop) -> None:
    shop.clock.advance(600_000)
    shop.store()
    shop.clock.advance(INTERVAL_MS)
    ahead_ms = shop.clock.now_ms() // INTERVAL_MS * INTERVAL_MS
    shop.allocate(ahead_ms)
    shop.store()
    shop.clock.set_back(600_000)
    shop.store()
    assert shop.ledger.clock_corrections.reopen(STREAM) is not None
    shop.store()
    assert shop.check().findings == []
    assert broken_rules(shop.ledger, STREAM) == []
