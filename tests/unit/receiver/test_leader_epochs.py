"""What is known of the leader epochs of records that were read, at any offset among them."""

from __future__ import annotations

from confluent_kafka import Message

from headrace.blocks import TopicPartition
from headrace.kafka.records import Cursor, EpochRecords, columns_of, convert
from headrace.ledger.receiving.tables import EpochEnd
from headrace.receiver.record_source import LeaderEpochs

P0 = TopicPartition("a", "id", 0)


def test_the_end_is_that_of_the_last_record_below_an_offset() -> None:
    epochs = LeaderEpochs()
    epochs.begin(P0, None)
    assert epochs.end_at(P0, 10) is None
    # Offsets 15 and 16 hold no record, and may be of either epoch.
    epochs.note(P0, [EpochRecords(10, 12, 3)])
    epochs.note(P0, [EpochRecords(12, 15, 3), EpochRecords(17, 18, 5)])
    expected = {10: None, 11: (3, 11), 15: (3, 15), 16: (3, 15), 17: (3, 15), 18: (5, 18), 30: (5, 18)}
    assert {at: epochs.end_at(P0, at) for at in expected} == {
        at: None if end is None else EpochEnd(*end) for at, end in expected.items()
    }


def test_what_is_known_at_the_beginning_holds_below_its_end_too() -> None:
    epochs = LeaderEpochs()
    epochs.begin(P0, EpochEnd(3, 20))
    assert [epochs.end_at(P0, at) for at in (5, 20, 22)] == [EpochEnd(3, 5), EpochEnd(3, 20), EpochEnd(3, 20)]
    epochs.note(P0, [EpochRecords(20, 25, 3)])
    assert epochs.end_at(P0, 25) == EpochEnd(3, 25)
    epochs.begin(P0, None)
    assert epochs.end_at(P0, 25) is None


def test_a_partition_that_is_not_read_is_not_noted() -> None:
    epochs = LeaderEpochs()
    epochs.note(P0, [EpochRecords(0, 1, 0)])
    assert epochs.end_at(P0, 1) is None
    epochs.begin(P0, EpochEnd(0, 1))
    epochs.forget(P0)
    assert epochs.end_at(P0, 1) is None


def test_messages_have_their_epochs_if_brokers_know_them() -> None:
    def read(*epochs: int | None) -> list[EpochRecords]:
        messages = [
            Message(topic="a", partition=0, offset=5 + number, timestamp=(1, 1), **_epoch(epoch))
            for number, epoch in enumerate(epochs)
        ]
        return convert(columns_of(messages), {("a", 0): Cursor(P0, 6)}).epochs.get(P0, [])

    assert read(1, 2, 2, 2) == [EpochRecords(6, 9, 2)], "below the position nothing is read"
    assert read(1, 2, 2, 4, 7) == [EpochRecords(6, 8, 2), EpochRecords(8, 9, 4), EpochRecords(9, 10, 7)]
    assert read(None, None, None) == []
    assert read(1) == []


def _epoch(epoch: int | None) -> dict[str, int]:
    return {} if epoch is None else {"leader_epoch": epoch}
