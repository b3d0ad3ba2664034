"""Which receiver has which partition of a custom input: each its own, also when their number changes."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.receiver.custom.conftest import CustomSetting, MakeCustom
from tests.unit.receiver.waiting import eventually

from headrace.fsck.stream_check import check_stream
from headrace.ledger import PartitionState
from headrace.views.trace import trace_record
from headrace.views.trace_location import Coordinates
from headrace.wal.reader import read_block


def owners(setting: CustomSetting) -> dict[int, tuple[int | None, PartitionState]]:
    return {
        row.partition.partition: (row.receiver_index, row.state) for row in setting.ledger.positions.all("air", "lines")
    }


def resized(setting: CustomSetting, receivers: int) -> None:
    setting.source = setting.source.model_copy(update={"receivers": receivers})


def test_each_receiver_has_the_partition_of_its_index_and_the_topic_id_is_fixed(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=3)
    assert owners(setting) == {index: (index, PartitionState.ACTIVE) for index in range(3)}
    assert {row.partition.topic_id for row in setting.ledger.positions.all("air")} == {"receiver:lines"}
    assert {row.partition.topic for row in setting.ledger.positions.all("air")} == {"lines"}


def test_a_receiver_that_is_not_live_keeps_its_partition_to_itself(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    setting.discover(1)
    assert owners(setting)[1] == (1, PartitionState.ACTIVE)
    assert owners(setting)[0][0] in (0, None)


def test_partitions_without_a_receiver_end_and_come_back(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    resized(setting, 1)
    setting.discover(0)
    assert owners(setting)[0] == (0, PartitionState.ACTIVE)
    assert owners(setting)[1][1] is PartitionState.ENDED
    setting.discover(0)
    assert owners(setting)[1][1] is PartitionState.ENDED
    resized(setting, 2)
    setting.discover(0, 1)
    assert owners(setting)[1][1] is PartitionState.ACTIVE


def test_two_receivers_number_their_records_by_themselves(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    running = [setting.start(index) for index in (0, 1)]
    first, second = (setting.receiver_of(index) for index in (0, 1))
    first.store(["a", "b"], position="first")
    second.store("c", position="second")
    eventually(lambda: len(setting.stored()) == 3)
    for each in running:
        each.end()
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b"), (1, 0, b"c")]
    positions = {row.partition.partition: row.source_position for row in setting.ledger.positions.all("air")}
    assert positions == {0: '"first"', 1: '"second"'}
    assert (first.receivers, second.index) == (2, 1)


def test_a_position_is_kept_in_a_header_of_the_log(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store("a", position=[1, "x"], wait=True)
    running.end()
    (time,) = setting.ledger.blocks.unclaimed("air")
    (block,) = setting.ledger.allocations.blocks_of("air", time.batch_time_ms)
    header, _ = read_block(setting.context.storage.below("log"), block.info.handle)
    assert header.source_position == '[1,"x"]'
    # The ledger's row of a block has no room for it: the position's row has it.
    assert replace(block.info, source_position=None) == block.info


def test_fsck_finds_nothing_wrong_and_asks_no_kafka(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store(["a", "b"], wait=True)
    running.end()
    report = check_stream(setting.ledger, "air", kafka=True)
    assert report.findings == []
    assert report.unchecked == []


def test_a_traced_record_is_found_in_the_log_and_never_sought_in_kafka(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store(["a", "b"], wait=True)
    running.end()
    found = trace_record(setting.context, Coordinates("lines", 0, 1))
    assert found.record is not None
    assert (found.record.value, found.record.read_from) == (b"b", "log")
