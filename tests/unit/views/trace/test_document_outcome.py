"""What a document and dead letters say of a record: the cases, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.blocks import TopicPartition
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream
from headrace.stream.outputs import ColumnIds, RecordIds
from headrace.views.trace import DocumentQuestion, is_value, judge
from headrace.views.traced import Outcome, Record, RecordPosition, TracedDocument, TracedLetter

POSITION = RecordPosition("records", TopicPartition("clicks", "id-1", 0), 7)
LETTER = TracedLetter(
    index="clicks-dead-letters",
    id="a/b",
    reason_type="mapper_parsing_exception",
    reason="no number",
    batch_time_ms=10,
    attempt=1,
    replayed_at_ms=None,
)
REPLAYED = LETTER.model_copy(update={"replayed_at_ms": 99})


def asked(
    ids: Any = None, *, value: bytes | None = b"{}", transform: str | None = None, written: bool = True
) -> DocumentQuestion:
    output = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks", document_ids=ids or RecordIds())
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=output,
        transform=transform,
        batch_interval="10 s",
        storage="/tmp/shop",
        ledger="sqlite:////tmp/shop.db",
    )
    record = Record(timestamp_ms=0, timestamp_type=0, key=b"cup", value=value, headers=(), read_from="log")
    return DocumentQuestion(stream, output, POSITION, record, "clicks", written, "It waits.")


def document(version: int = 1, *, found: bool = True, same: bool | None = None) -> TracedDocument:
    return TracedDocument(
        index="clicks", id="clicks+0+7", found=found, version=version if found else None, same=same, source=None
    )


GONE = document(found=False)


@pytest.mark.parametrize(
    ("question", "there", "letters", "outcome", "words"),
    [
        (asked(), document(same=True), (), Outcome.DOCUMENT, "equal to the record's value"),
        (asked(), document(same=False), (), Outcome.DOCUMENT, "other contents"),
        (asked(transform="a:b"), document(), (), Outcome.DOCUMENT, "a:b made of it"),
        (asked(), GONE, (LETTER,), Outcome.DEAD_LETTER, "no number"),
        (asked(), document(same=True), (REPLAYED,), Outcome.DOCUMENT, "was refused in 1"),
        (asked(), GONE, (REPLAYED,), Outcome.WRITTEN, "replayed since"),
        (asked(), GONE, (), Outcome.NEITHER, "was deleted since"),
        (asked(transform="a:b"), GONE, (), Outcome.NEITHER, "a:b dropped the record"),
        (asked(written=False), GONE, (), Outcome.NOT_WRITTEN, "It waits."),
        (asked(written=False), document(same=True), (), Outcome.DOCUMENT, "equal"),
        (asked(KeyIds()), document(7, same=True), (), Outcome.DOCUMENT, "the record's offset"),
        (asked(KeyIds()), document(9), (), Outcome.NEWER_DOCUMENT, "offset 9 has replaced it"),
        (asked(KeyIds()), document(3), (), Outcome.NEITHER, "of an earlier record"),
        (asked(KeyIds()), document(9), (LETTER,), Outcome.DEAD_LETTER, "no number"),
        (asked(KeyIds(), transform="a:b"), GONE, (), Outcome.NEITHER, "changed its key"),
        (asked(KeyIds(), value=None), GONE, (), Outcome.NEITHER, "deletes the document of its key"),
        (asked(KeyIds(version_from="n"), transform="a:b"), document(9), (), Outcome.UNKNOWN, "the column 'n'"),
        (asked(ColumnIds(columns=("word",)), transform="a:b"), None, (), Outcome.WRITTEN, "No id."),
        (asked(ColumnIds(columns=("word",)), transform="a:b"), None, (LETTER,), Outcome.DEAD_LETTER, "no number"),
    ],
)
def test_an_outcome_says_only_what_is_known(
    question: DocumentQuestion, there: TracedDocument | None, letters: Any, outcome: Outcome, words: str
) -> None:
    found, text = judge(question, there, letters, "no id")
    assert (found, words in text) == (outcome, True), text


def test_a_document_is_compared_with_the_value_as_json() -> None:
    assert is_value({"n": 1, "a": "b"}, b'{"a": "b", "n": 1}') is True
    assert is_value({"n": 2}, b'{"n": 1}') is False
    assert is_value({"n": 2}, b"junk") is None
    assert is_value(None, b"{}") is None and is_value({}, None) is None
