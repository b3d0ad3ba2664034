"""The limit of dead letters, over all that an output writes of a batch; the writes themselves are Spark's."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.batch.places import LETTERS, PLACE, TRUNCATED_BELOW, TRUNCATED_BELOW_THEN, place_of
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.clock import SystemClock
from headrace.elasticsearch.counts import HeldVersion, IndexingCounts, IndexingReport
from headrace.elasticsearch.errors import ForeignVersionsError, TooManyDeadLettersError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import ConcreteIndex
from headrace.errors import Failure
from headrace.spark.outputs import elasticsearch, elasticsearch_sink
from headrace.spark.outputs.elasticsearch import ElasticsearchOutputWriter, options_of
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.records.transforms import BatchContext
from headrace.stream import DeadLetterLimit, DeadLetterTopic, ElasticsearchOutput, KafkaInput, KeyIds, Stream
from headrace.wal.storage import open_storage

OUTPUT = ElasticsearchOutput(hosts="http://h:1", index="clicks")
NOW_MS = SystemClock().now_ms()


@pytest.fixture
def written(tmp_path: Any) -> WrittenBatch:
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="h:1", topics="clicks"),
        outputs=OUTPUT,
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    return WrittenBatch(
        stream=stream,
        context=BatchContext.of("shop", 10_000, 10_000, 1),
        batch_time_ms=10_000,
        attempt=1,
        manifest_uri="",
        from_kafka=False,
        target="",
        out=io.StringIO(),
        progress=lambda _: None,
    )


@pytest.fixture
def write(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a batch of which these rows were rejected, by reason, by the documents' and the undecodables' writes."""

    def batch(limit: DeadLetterLimit, rows: int, rejected: dict[str, int], undecodable: int = 0) -> list[Any]:
        output = ElasticsearchOutput(hosts="http://h:1", index="clicks", dead_letter_limit=limit)
        stream = Stream(
            name="shop",
            inputs=KafkaInput(bootstrap_servers="h:1", topics="clicks"),
            outputs=output,
            batch_interval="10 s",
            storage=tmp_path,
            ledger=f"sqlite:///{tmp_path}/ledger.db",
        )
        writes: list[Any] = []

        def documents(_: Any, __: Any, options: IndexingOptions, **___: Any) -> Any:
            writes.append(("documents", options.attempt))
            counts = IndexingCounts(rows=rows, dead_lettered=sum(rejected.values()), created=rows)
            counts.dead_letter_reasons.update(rejected)
            return IndexingReport(options.target, counts)

        def letters(*_: Any, **__: Any) -> Any:
            writes.append("undecodable")
            counts = IndexingCounts(rows=undecodable, dead_lettered=undecodable)
            counts.dead_letter_reasons["rejected"] = undecodable
            return SimpleNamespace(counts=counts)

        def withdrawn(options: IndexingOptions) -> int:
            writes.append(("withdraw", options.attempt))
            return 0

        monkeypatch.setattr(elasticsearch_sink, "withdraw_letters", withdrawn)
        monkeypatch.setattr(elasticsearch, "write_documents", documents)
        monkeypatch.setattr(elasticsearch, "write_undecodable", letters)
        written = WrittenBatch(
            stream=stream,
            context=BatchContext.of("shop", 10_000, 10_000, 3),
            batch_time_ms=10_000,
            attempt=3,
            manifest_uri="m",
            from_kafka=False,
            target="",
            undecodable=lambda: {"records": Any} if undecodable else {},  # type: ignore[dict-item]
            out=io.StringIO(),
            progress=lambda _: None,
        )
        ElasticsearchOutputWriter(output).write(object(), written)  # type: ignore[arg-type]
        return writes

    return batch


def test_earlier_letters_are_withdrawn_after_both_writes(write: Any) -> None:
    written = write(DeadLetterLimit(), 10, {}, undecodable=1)
    assert written == [("documents", 3), "undecodable", ("withdraw", 3)]


def test_the_limit_is_over_both_writes(write: Any) -> None:
    limit = DeadLetterLimit(tolerated=10)
    write(limit, 12, {"document_parsing_exception": 8}, undecodable=2)
    with pytest.raises(TooManyDeadLettersError, match=r"Of 15 rows .* 11 are dead letters, more than the 50%") as error:
        write(limit, 12, {"document_parsing_exception": 8}, undecodable=3)
    kept = ("'clicks-dead-letters'", "headrace dead-letters list shop")
    for part in ("8 document_parsing_exception, 3 rejected", *kept):
        assert part in str(error.value)
    assert error.value.failure is Failure.CODE
    assert "dead_letter_limit.share" in error.value.exceeded
    assert error.value.counts["dead_letter_reasons"] == {"document_parsing_exception": 8, "rejected": 3}


def test_records_without_a_value_do_not_count(write: Any) -> None:
    write(DeadLetterLimit(number=1), 10, {"tombstone": 9, "missing_id": 1})


def test_the_batch_of_a_transforms_test_has_no_manifest() -> None:
    output = ElasticsearchOutput(hosts="http://h:1", index="clicks")
    batch: Any = SimpleNamespace(
        manifest_uri="",
        from_kafka=False,
        earlier=(),
        stream=SimpleNamespace(name="shop", kafka_inputs=(), elasticsearch_outputs=()),
        batch_time_ms=10_000,
        attempt=1,
        written_before=False,
        tried_before=False,
        target="",
        known_place=lambda _: None,
    )
    assert options_of(output, batch, report="r").manifests == ()


def test_a_batchs_letters_know_the_topics_that_it_has_read(written: WrittenBatch) -> None:
    """They never go there, by whatever connection. Of other topics none is of interest."""
    partitions = [TopicPartition("clicks", "id-1", 0), TopicPartition("views", "id-2", 0)]
    taken = tuple(OffsetRange(partition, 0, 5, 5) for partition in partitions)
    block = ManifestBlock(BlockHandle("a.seg", 0, 10), 10, 100, taken)
    stream = written.stream
    manifest = Manifest("shop", 10_000, 10_000, {stream.inputs[0].id: (block,)}, stream.folder_url)
    manifest.write(open_storage(stream.folder_url))
    batch = replace(written, manifest_uri=manifest.uri)
    letters = DeadLetterTopic(topic="clicks", bootstrap_servers="elsewhere:1")
    topic = options_of(OUTPUT.model_copy(update={"dead_letter_topic": letters}), batch, report="r").letter_topic
    assert topic is not None
    assert (topic.topic, topic.bootstrap_servers, topic.read_topics) == ("clicks", "elsewhere:1", ("id-1",))
    assert topic.began_ms >= NOW_MS
    assert options_of(OUTPUT, batch, report="r").letter_topic is None


@pytest.mark.parametrize(
    ("version", "refused"), [(NOW_MS + 3_600_000, False), (NOW_MS + 366 * 86_400_000, True)], ids=["soon", "in a year"]
)
def test_documents_of_a_time_that_nobody_has_yet_fail_the_batch(
    written: WrittenBatch, version: int, *, refused: bool
) -> None:
    """A clock was a year ahead: no update would be written for a year. Another stream may be an hour ahead."""
    counts = IndexingCounts(rows=1, superseded=1, held={"": HeldVersion(version, "a")})
    options = options_of(OUTPUT, written, report="r")
    with pytest.raises(ForeignVersionsError, match="document 'a'") if refused else contextlib.nullcontext():
        ElasticsearchOutputWriter(OUTPUT)._check_versions(counts, written, options)


def test_the_versions_of_offsets_are_checked_by_partition(written: WrittenBatch) -> None:
    """They are left out of the counts."""
    asked: list[Any] = []
    said: list[str] = []

    def check(index: str, held: Any) -> str:
        asked.append((index, held))
        return "cannot be asked"

    counts = IndexingCounts(rows=1, superseded=1, held={"a-b-12": HeldVersion(7, "k")})
    batch = replace(written, check_held_versions=check, progress=said.append)
    ElasticsearchOutputWriter(OUTPUT)._check_versions(counts, batch, options_of(OUTPUT, written, report="r"))
    assert asked == [("clicks", {("a-b", 12): HeldVersion(7, "k")})]
    assert said == ["warning: output elasticsearch: cannot be asked"]
    assert "held" not in counts.to_dict()


def test_the_place_of_a_batch_keeps_the_alias_of_earlier_letters(written: WrittenBatch) -> None:
    """It keeps it while the alias has its name."""
    letters = OUTPUT.dead_letters
    recorded = {**place_of(OUTPUT, ConcreteIndex("clicks-1", "u1")), LETTERS: [letters, "letters-1"]}
    batch = replace(written, known_place=lambda _: recorded)
    options = options_of(OUTPUT, batch, report="r")
    target = options.target
    assert (target.known, target.known_letters_index) == ((ConcreteIndex("clicks-1", "u1"),), "letters-1")
    report = IndexingReport(replace(target, concrete=ConcreteIndex("clicks-1", "u1")), IndexingCounts())
    counts = ElasticsearchOutputWriter(OUTPUT)._outcome(report, IndexingCounts(), batch, options)
    assert (counts["index"], counts[PLACE]) == ("clicks-1", recorded)
    moved = OUTPUT.model_copy(update={"dead_letter_index": "others"})
    assert options_of(moved, batch, report="r").target.known_letters_index is None


@pytest.mark.parametrize(
    ("own", "below", "then", "recorded"),
    [
        (0, 0, 0, None),
        (0, 700, 300, (700, 300)),
        (0, 700, 0, (700, 0)),
        (500, 700, 300, (700, 500)),
        (900, 700, 300, (900, 900)),
    ],
)
def test_the_place_of_a_batch_keeps_two_marks_of_truncates(
    written: WrittenBatch, own: int, below: int, then: int, recorded: tuple[int, int] | None
) -> None:
    """What a batch knows of later truncates when it runs again is apart from what it applied or found before it."""
    output = OUTPUT.model_copy(update={"document_ids": KeyIds(version_from="position"), "truncates": "apply"})
    place = place_of(output, ConcreteIndex("clicks-1", "u1"))
    known = {**place, TRUNCATED_BELOW: below, TRUNCATED_BELOW_THEN: then} if below else place
    batch = replace(written, known_place=lambda _: known)
    options = options_of(output, batch, report="r")
    assert options.truncated_below == below
    report = IndexingReport(replace(options.target, concrete=ConcreteIndex("clicks-1", "u1")), IndexingCounts())
    counts = IndexingCounts(rows=1, truncates=1, truncated_below=own)
    marks = ElasticsearchOutputWriter(output)._outcome(report, counts, batch, options)[PLACE]
    assert (marks.get(TRUNCATED_BELOW), marks.get(TRUNCATED_BELOW_THEN)) == (recorded or (None, None))
