"""Where a record is, by a real ledger and a real log: one test for each place that a record can be in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.fsck.conftest import INPUT, INTERVAL_MS, START_MS, STREAM, TIMES, Shop
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, KeyIds, ParquetOutput
from headrace.stream.outputs import ColumnIds
from headrace.views import trace_location
from headrace.views.trace import DocumentLookup, trace_document, trace_record
from headrace.views.trace_location import Coordinates
from headrace.views.trace_records import RecordReader
from headrace.views.traced import Outcome, RecordPosition, RecordState, RecordTrace, TracedDocument, UnknownRecordError


def trace(shop: Shop, offset: int, *, partition: int = 0, incarnation: int | None = None) -> RecordTrace:
    return trace_record(shop.context, Coordinates("clicks", partition, offset, incarnation))


def take(shop: Shop) -> None:
    """Allocate the first batch."""
    shop.clock.advance(INTERVAL_MS)
    shop.allocate(TIMES[0])


def test_a_completed_batchs_record_has_its_block_and_attempt(make_shop: Any) -> None:
    """The batch itself and its output are there too."""
    shop: Shop = make_shop()
    shop.store()
    take(shop)
    shop.complete(TIMES[0])
    traced = trace(shop, 1)
    assert traced.state is RecordState.IN_BATCH
    assert traced.record is not None and traced.block is not None and traced.batch is not None
    assert (traced.record.value, traced.record.timestamp_ms, traced.record.read_from) == (b"1", START_MS, "log")
    block = traced.block
    assert (block.from_offset, block.until_offset, block.in_log, block.sequence) == (0, 3, True, 0)
    assert block.segment in [path.removeprefix("log/") for path in shop.segments()]
    assert (traced.batch.batch_time_ms, traced.batch.state, traced.batch.revision) == (TIMES[0], "completed", 1)
    (attempt,) = traced.attempts
    assert (attempt.number, attempt.state, attempt.holder) == (1, "completed", "task")
    (output,) = traced.outputs
    assert (output.output_id, output.outcome, output.counts) == ("console", Outcome.WRITTEN, {"printed": 1})


def test_each_record_is_found_in_its_own_block(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store({0: 3})
    shop.store({0: 2, 1: 4})
    take(shop)
    found = [trace(shop, offset).block for offset in range(5)]
    assert [block and (block.from_offset, block.until_offset) for block in found] == [(0, 3)] * 3 + [(3, 5)] * 2
    assert [trace(shop, n, partition=1).record.value for n in range(4)] == [b"0", b"1", b"2", b"3"]  # type: ignore[union-attr]


def test_a_record_whose_batch_is_not_allocated_waits_in_the_log(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    shop.clock.advance(INTERVAL_MS)
    shop.store()
    traced = trace(shop, 4)
    assert (traced.state, traced.batch, traced.outputs) == (RecordState.WAITING, None, ())
    assert traced.block is not None and traced.block.batch_time_ms == TIMES[1]
    assert traced.record is not None and traced.record.value == b"4"


def test_a_waiting_record_is_found_behind_many_waiting_times(make_shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than are read at once."""
    monkeypatch.setattr(trace_location, "_TIMES_OF_A_PAGE", 10)
    shop: Shop = make_shop()
    for _ in range(45):
        shop.store({0: 1})
        shop.clock.advance(INTERVAL_MS)
    traced = trace(shop, 44)
    assert traced.block is not None and traced.block.batch_time_ms == TIMES[44]


def test_an_offset_from_the_position_on_is_not_received(make_shop: Any) -> None:
    """The position is the receiver's."""
    shop: Shop = make_shop()
    shop.store({0: 3})
    traced = trace(shop, 3)
    assert (traced.state, traced.block) == (RecordState.NOT_RECEIVED, None)
    assert "next offset of the partition is 3" in traced.text
    assert traced.record is None and traced.record_problem


def test_a_failed_partition_says_why_a_record_is_not_received(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.ledger.positions.fail(shop.lease, shop.partition(0), "Kafka lost offsets 0 to 9.")
    assert "The partition is failed: Kafka lost offsets 0 to 9." in trace(shop, 5).text


def test_an_offset_in_a_gap_has_the_reason_of_the_gap(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store({0: 3})
    shop.advance(0, 10, gap="retention")
    shop.store({0: 1})
    traced = trace(shop, 7)
    assert (traced.state, traced.record_problem) == (RecordState.GAP, None)
    assert "[3, 13)" in traced.text and "retention" in traced.text
    assert trace(shop, 13).state is RecordState.WAITING


def test_an_offset_in_a_gap_of_a_batch_has_the_gaps_reason(make_shop: Any) -> None:
    """The gap is between two blocks."""
    shop: Shop = make_shop()
    shop.store({0: 3}, skip=1)
    shop.advance(0, 10, gap="retention")
    shop.store({0: 1})
    take(shop)
    traced = trace(shop, 7)
    assert (traced.state, traced.record_problem) == (RecordState.GAP, None)
    assert "[4, 14)" in traced.text and "retention" in traced.text
    assert traced.batch is not None and traced.batch.batch_time_ms == TIMES[0]


def test_a_hole_in_an_abandoned_batch_is_no_record_and_no_gap(make_shop: Any) -> None:
    """The hole is one in its offsets."""
    shop: Shop = make_shop()
    shop.store({0: 3})
    shop.advance(0, 4)
    shop.store({0: 1})
    take(shop)
    shop.ledger.batches.abandon(STREAM, TIMES[0], "never mind")
    assert trace(shop, 5).state is RecordState.NO_RECORD


def test_a_hole_in_the_offsets_is_no_record_and_no_gap(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store({0: 3}, skip=2)
    shop.advance(0, 4)
    take(shop)
    assert [trace(shop, offset).state for offset in (2, 3, 5)] == [
        RecordState.IN_BATCH, RecordState.NO_RECORD, RecordState.NO_RECORD
    ]  # fmt: skip


@pytest.fixture
def compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka answers, and has no record at any offset."""
    monkeypatch.setattr(RecordReader, "from_kafka", lambda reader, position: None)


@pytest.mark.usefixtures("compacted")
def test_a_record_compacted_after_the_log_keeps_its_batch(make_shop: Any) -> None:
    """It keeps its outputs too; it was compacted after its block had left the log."""
    shop: Shop = make_shop()
    shop.store()
    shop.new_epoch()
    for time_ms in TIMES[:3]:
        shop.clock.advance(INTERVAL_MS)
        shop.run(time_ms)
    assert shop.clean().segments
    traced = trace(shop, 1)
    assert (traced.state, traced.record, len(traced.outputs)) == (RecordState.IN_BATCH, None, 1)
    assert traced.record_problem is not None and "compacted since" in traced.record_problem
    assert "no longer has its block" in traced.record_problem


@pytest.mark.usefixtures("compacted")
def test_a_compacted_record_of_a_damaged_block_keeps_its_batch(make_shop: Any) -> None:
    """It keeps its outputs too."""
    shop: Shop = make_shop()
    info = shop.write({0: 3})
    shop.ledger.blocks.add(shop.lease, info)
    take(shop)
    path = shop.log_path(info.handle.segment)
    damaged = bytearray(path.read_bytes())
    damaged[info.handle.offset + info.handle.length - 5] ^= 0xFF
    path.write_bytes(bytes(damaged))
    traced = trace(shop, 1)
    assert (traced.state, len(traced.outputs)) == (RecordState.IN_BATCH, 1)
    assert traced.record_problem is not None and "no record at the offset any more" in traced.record_problem


@pytest.mark.usefixtures("compacted")
def test_a_batch_without_manifest_says_why_the_block_is_unknown(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    take(shop)
    batch = shop.ledger.batches.get(STREAM, TIMES[0])
    shop.sql("DELETE FROM blocks")
    Path(batch.manifest_uri.removeprefix("file://")).unlink()
    traced = trace(shop, 1)
    assert (traced.state, traced.block, len(traced.outputs)) == (RecordState.IN_BATCH, None, 1)
    assert "Its block is not known: " in traced.text
    assert traced.record_problem is not None and "is not known" in traced.record_problem


def test_an_output_with_nothing_to_write_says_so(make_shop: Any) -> None:
    """No document is looked up."""
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks", request_timeout_seconds=1)
    shop: Shop = make_shop(outputs=output)
    shop.store()
    take(shop)
    attempt = shop.begin(TIMES[0])
    shop.ledger.attempts.record_output(attempt, output.id, {"skipped": "no window ends here"})
    shop.ledger.attempts.complete(attempt)
    (traced,) = trace(shop, 1).outputs
    assert traced.text == "The output had nothing to write at this batch time: no window ends here."
    assert traced.document is None


def test_an_abandoned_batch_says_so(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    take(shop)
    shop.ledger.batches.abandon(STREAM, TIMES[0], "the index is gone")
    traced = trace(shop, 0)
    assert traced.batch is not None
    assert (traced.batch.state, traced.batch.error, traced.batch.source) == ("abandoned", "the index is gone", None)
    assert traced.outputs[0].outcome is Outcome.NOT_WRITTEN


def test_a_block_that_left_the_log_is_named_by_the_manifest(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    before = trace(shop, 1).block
    shop.new_epoch()
    for time_ms in TIMES[:3]:
        shop.clock.advance(INTERVAL_MS)
        shop.run(time_ms)
    assert shop.clean().segments
    traced = trace(shop, 1)
    assert traced.state is RecordState.IN_BATCH and traced.batch is not None and traced.batch.source == "kafka"
    assert before is not None and traced.block is not None
    assert (traced.block.segment, traced.block.offset) == (before.segment, before.offset)
    assert (traced.block.in_log, traced.block.receiver) == (False, None)
    assert traced.record is None and traced.record_problem


def test_a_removed_batch_is_said_to_be_removed(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    take(shop)
    shop.sql("DELETE FROM batch_inputs")
    shop.sql("UPDATE positions SET removed_until_offset = 3")
    shop.sql("DELETE FROM blocks")
    assert trace(shop, 1).state is RecordState.REMOVED


def test_an_offset_before_the_stream_began_is_called_that(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.sql("UPDATE positions SET starting_offset = 5, next_offset = 5")
    traced = trace(shop, 1)
    assert (traced.state, traced.batch) == (RecordState.BEFORE_START, None)


def test_each_incarnation_of_a_topic_has_its_own_offsets(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store({0: 5})
    take(shop)
    shop.recreate()
    shop.store({0: 2})
    now, before = trace(shop, 1), trace(shop, 1, incarnation=1)
    assert (now.position.partition.incarnation, now.state) == (2, RecordState.WAITING)
    assert [other.partition.incarnation for other in now.elsewhere] == [1]
    assert (before.position.partition.incarnation, before.state) == (1, RecordState.IN_BATCH)
    only_earlier = trace(shop, 4)
    assert only_earlier.position.partition.incarnation == 1
    assert "its present incarnation has not reached the offset" in only_earlier.text
    with pytest.raises(UnknownRecordError, match=r"not seen incarnation 3 .* only 1, 2"):
        trace(shop, 1, incarnation=3)


def test_an_unknown_topic_or_partition_names_what_is_known(make_shop: Any) -> None:
    shop: Shop = make_shop()
    with pytest.raises(UnknownRecordError, match=r"not seen a topic 'orders'.*: clicks\."):
        trace_record(shop.context, Coordinates("orders", 0, 1))
    with pytest.raises(UnknownRecordError, match=r"does not read partition 7 .* had 2 partition"):
        trace(shop, 0, partition=7)


def test_a_damaged_block_is_reported_and_the_rest_is_traced(make_shop: Any) -> None:
    shop: Shop = make_shop()
    info = shop.write({0: 3})
    shop.ledger.blocks.add(shop.lease, info)
    take(shop)
    path = shop.log_path(info.handle.segment)
    damaged = bytearray(path.read_bytes())
    damaged[info.handle.offset + info.handle.length - 5] ^= 0xFF
    path.write_bytes(bytes(damaged))
    traced = trace(shop, 1)
    assert traced.state is RecordState.IN_BATCH and traced.batch is not None
    assert traced.record is None and traced.record_problem is not None and "In Kafka:" in traced.record_problem


def test_attempts_of_a_replay_and_its_outputs_are_traced_too(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store()
    take(shop)
    shop.complete(TIMES[0])
    attempt = shop.ledger.replays.begin(
        STREAM, TIMES[0], target="copy", definition=shop.stream.to_json(), outputs=["console"],
        holder="task", way="connect", lease_ms=1000, attributes={"run_id": "backfill__1"},
    )  # fmt: skip
    traced = trace(shop, 1)
    assert [(each.target, each.run_id) for each in traced.attempts] == [("", None), ("copy", "backfill__1")]
    assert [(output.target, output.outcome) for output in traced.outputs] == [
        ("", Outcome.WRITTEN), ("copy", Outcome.NOT_WRITTEN)
    ]  # fmt: skip
    shop.ledger.attempts.record_output(attempt, "console", {"printed": 2})
    shop.ledger.attempts.complete(attempt)
    assert trace(shop, 1).outputs[1].outcome is Outcome.WRITTEN


def test_an_output_is_traced_with_the_definition_that_wrote_it(make_shop: Any) -> None:
    """It was added, removed or moved since; the batch keeps what it was written with."""
    shop: Shop = make_shop(outputs=ParquetOutput(id="files", path="/data/old"))
    shop.store()
    take(shop)
    attempt = shop.ledger.attempts.begin(
        STREAM, TIMES[0], holder="task", way="connect", lease_ms=60_000, outputs=["files"], revision=1
    )
    shop.ledger.attempts.record_output(attempt, "files", {"rows": 3})
    shop.ledger.attempts.complete(attempt)
    shop.stream = shop.stream.model_copy(update={"outputs": (ParquetOutput(id="files", path="/data/new"),)})
    shop.register()
    (output,) = trace(shop, 1).outputs
    assert output.revision == 1 and f"/data/old/batch_time={TIMES[0]}/" in output.text


def test_a_failed_output_has_its_error(make_shop: Any) -> None:
    """An Elasticsearch that cannot be reached is named as well."""
    nowhere = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks", request_timeout_seconds=1)
    shop: Shop = make_shop(outputs=(nowhere, ParquetOutput(path="/data")))
    shop.store()
    take(shop)
    shop.ledger.attempts.fail(shop.begin(TIMES[0]), "no room")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.views.trace.MAX_RETRY_SECONDS", 0.0)
        documents, files = trace(shop, 1).outputs
    assert documents.outcome is Outcome.UNKNOWN and "The search server could not be asked" in documents.text
    assert files.outcome is Outcome.NOT_WRITTEN and "attempt 1 failed: no room" in files.text


IDS: list[tuple[str, tuple[str, int, int, int | None]]] = [
    ("clicks+0+1", ("clicks", 0, 1, 1)),
    ("clicks+1+1+2", ("clicks", 1, 1, 2)),
    ("clicks+0+1~a+b", ("clicks", 0, 1, 1)),
]


@pytest.mark.parametrize(("id_", "expected"), IDS)
def test_a_document_id_of_the_default_form_names_its_record(
    make_shop: Any, id_: str, expected: tuple[str, int, int, int | None]
) -> None:
    from headrace.views.trace_location import coordinates_of

    shop: Shop = make_shop(outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks"))
    assert coordinates_of(shop.context, id_) == Coordinates(*expected)


def test_an_id_without_a_record_says_which_form_is_needed(make_shop: Any) -> None:
    def refused(shop: Shop, id_: str) -> str:
        with pytest.raises(UnknownRecordError) as error:
            trace_document(shop.context, id_)
        return str(error.value)

    url = "http://127.0.0.1:1"
    assert "topic+partition+offset" in refused(make_shop(outputs=ElasticsearchOutput(hosts=url, index="a")), "cup")
    by_columns = ElasticsearchOutput(hosts=url, index="a", transform="m:f", document_ids=ColumnIds(columns=("word",)))
    assert "--key" in refused(make_shop(outputs=by_columns), "cup+1700000010000")
    by_field = ElasticsearchOutput(hosts=url, index="a", transform="m:f", document_ids=KeyIds(version_from="n"))
    assert "versions in a are those of 'n'" in refused(make_shop(outputs=by_field), "cup")
    assert "no Elasticsearch output" in refused(make_shop(), "clicks+0+1")


def test_a_decoded_key_leads_to_the_record_by_its_offset(make_shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Spark can say which key made the id, so two records with this offset are both named."""
    source = KafkaInput(
        id=INPUT, bootstrap_servers="127.0.0.1:1", topics=INPUT, key_decoder=JsonDecoder(fields="id LONG")
    )
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="a", document_ids=KeyIds())
    shop: Shop = make_shop(inputs=source, outputs=output)
    shop.key = b'{"id": 7}'
    shop.store({0: 3, 1: 2})
    take(shop)
    shop.complete(TIMES[0])

    def found(_: Any, index: str, id_: str) -> TracedDocument:
        return TracedDocument(index=index, id=id_, found=True, version=version, same=None, source=None)

    monkeypatch.setattr(DocumentLookup, "document", found)
    monkeypatch.setattr(DocumentLookup, "letters", lambda *_: ())
    version = 2
    traced = trace_document(shop.context, "7")
    assert (traced.position.partition.partition, traced.position.offset) == (0, 2)
    assert traced.outputs[0].outcome is Outcome.DOCUMENT
    version = 1
    with pytest.raises(UnknownRecordError, match=r"is a decoded one: .*\(clicks 0 1, clicks 1 1\)"):
        trace_document(shop.context, "7")
    read = RecordReader.read

    def read_some(self: RecordReader, position: RecordPosition, block: Any) -> Any:
        if position.partition.partition == 0:
            raise UnknownRecordError("unreadable")
        return read(self, position, block)

    monkeypatch.setattr(RecordReader, "read", read_some)
    with pytest.raises(UnknownRecordError, match="clicks 0 1, clicks 1 1"):
        trace_document(shop.context, "7")


def test_two_inputs_of_one_topic_are_told_apart_by_the_input(make_shop: Any) -> None:
    shop: Shop = make_shop()
    shop.store({0: 3})
    other = shop.partition(0)
    shop.ledger.topics.observe(shop.job, "other", [("clicks", shop.topic_id, 1)])
    shop.ledger.positions.ensure_all(shop.job, "other", {other: 0})
    asked = Coordinates("clicks", 0, 1)
    assert trace_record(shop.context, asked).position.input_id == "clicks"
    traced = trace_record(shop.context, asked, input_id="other")
    assert (traced.position.input_id, traced.state) == ("other", RecordState.NOT_RECEIVED)
    with pytest.raises(UnknownRecordError, match="in input 'none'"):
        trace_record(shop.context, asked, input_id="none")


def run(shop: Shop, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", STREAM, *arguments, "--ledger", shop.stream.ledger])


def test_the_command_prints_the_way_and_as_json(shop: Shop) -> None:
    printed = run(shop, "clicks", "0", "1")
    assert printed.exit_code == 0, printed.output
    assert "It is in batch" in printed.stdout and "Value: 1" in printed.stdout and "Output console" in printed.stdout
    fields = json.loads(run(shop, "clicks", "0", "1", "--json").stdout)
    assert (fields["state"], fields["record"]["value"], fields["batch"]["batch_time_ms"]) == ("in_batch", "1", TIMES[0])
    assert fields["batch"]["batch_time"] == "2023-11-14T22:13:30Z"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("clicks", "0"),
        ("clicks", "0", "-1"),
        ("clicks", "0", "1", "--key", "cup"),
        ("--key", "cup", "--input", "clicks"),
        ("clicks+0+1", "--incarnation", "1"),
    ],
)
def test_the_command_says_which_forms_it_takes(shop: Shop, arguments: tuple[str, ...]) -> None:
    result = run(shop, *arguments)
    assert result.exit_code == 2
