"""Indexing one task's rows; rows of one batch with the same id are found in a task, and over all tasks."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch, error_response

from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letters import OriginalRecord
from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.errors import (
    DeadLettersRefusedError,
    DuplicateIdsError,
    ElasticsearchRefusedError,
    ElasticsearchUnavailableError,
    UnsuitableRowsError,
)
from headrace.elasticsearch.indexer import DuplicateIdCheck, Indexer, regroup, repeated_digests
from headrace.elasticsearch.transport import NoAnswerError, Response

Index = Callable[..., IndexingCounts]
LETTERS = "clicks-dead-letters"


class Originals:
    """Every record's original value tells its offset."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        return OriginalRecord(b"key", f"raw {topic} {partition} {offset} {incarnation}".encode(), (("h", b"v"),))


@pytest.fixture
def index(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Index:
    def index_rows(*batches: Any, originals: Any = None, **options: Any) -> IndexingCounts:
        return Indexer(elasticsearch, make_options(**options), originals=originals, clock=clock).index(batches)

    return index_rows


def test_every_row_has_its_outcome(index: Index, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    rows = make_rows([{"n": 1}, b"junk", None, {"n": 2}, b"", b"[1]"])
    counts = index(rows, tombstones="ignore")
    assert (counts.rows, counts.created, counts.dead_lettered, counts.ignored_tombstones) == (6, 2, 3, 1)
    assert counts.dead_letter_reasons == {"malformed_document": 3}
    assert counts.dead_letter_example.startswith("t, partition 0, offset 1: malformed_document: ")
    assert set(elasticsearch.documents(LETTERS)) == {"clicks/t+0+1", "clicks/t+0+4", "clicks/t+0+5"}


def test_a_letter_that_a_pipeline_drops_fails_the_batch(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    written = elasticsearch._carry_out

    def dropping(name: str, action: Any) -> Any:
        dropped = {"_id": action.id, "result": "noop", "status": 200}
        return dropped if name == LETTERS else written(name, action)

    elasticsearch._carry_out = dropping  # type: ignore[method-assign]
    with pytest.raises(DeadLettersRefusedError, match="an ingest pipeline of the index drops it"):
        index(make_rows([{"n": 1}, b"junk"]))


def test_letters_go_on_through_the_alias_of_earlier_letters(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """No index that has the alias's name is written to."""
    alias = {"letters-1": {"aliases": {LETTERS: {}}, "settings": {"index": {}}}}
    elasticsearch.descriptions[LETTERS] = alias
    carry_out = elasticsearch._carry_out
    elasticsearch._carry_out = lambda name, action: {  # type: ignore[method-assign]
        **carry_out(name, action),
        **({"_index": "letters-1"} if name == LETTERS else {}),
    }
    counts = index(make_rows([{"n": 1}, b"junk"]))
    assert counts.letters_index == "letters-1"
    assert IndexingCounts.from_dict(counts.to_dict()).letters_index == "letters-1"
    assert index(make_rows([b"junk"]), known_letters_index="letters-1").dead_lettered == 1
    del elasticsearch.descriptions[LETTERS], elasticsearch.indices[LETTERS]
    with pytest.raises(DeadLettersRefusedError, match=r"is gone now. It was an alias of 'letters-1'"):
        index(make_rows([b"junk"]), known_letters_index="letters-1")
    assert LETTERS not in elasticsearch.indices
    elasticsearch.indices[LETTERS] = {}
    with pytest.raises(DeadLettersRefusedError, match="is an index now"):
        index(make_rows([b"junk"]), known_letters_index="letters-1")


def refuses(*numbers: int, kind: str = "illegal_argument_exception") -> Callable[[Action], Any]:
    """Documents with these numbers are refused for a reason that may also be the index's."""
    return lambda action: (400, kind, "of a processor") if action.document.get("n") in numbers else None


def test_a_document_is_at_fault_if_others_pass_elsewhere(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """The others pass in another request of the same task."""
    elasticsearch.item_fault = refuses(*range(10), kind="of_a_later_version")
    counts = index(make_rows([{"n": n} for n in range(11)]), bulk_actions=2, requests_in_flight=1)
    assert (counts.created, counts.dead_lettered) == (1, 10)


def test_an_index_that_no_document_passes_is_at_fault(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.item_fault = refuses(*range(1000))
    with pytest.raises(
        ElasticsearchRefusedError, match=r"refuses all 2 documents that were sent, such as document 't\+0"
    ):
        index(make_rows([{"n": 0}, {"n": 1}]))
    elasticsearch.requests.clear()
    with pytest.raises(ElasticsearchRefusedError, match="refuses all"):
        index(make_rows([{"n": n} for n in range(1000)]), bulk_actions=10)
    assert len(elasticsearch.requests) <= 20, "it is not asked for each of them"
    assert LETTERS not in elasticsearch.indices


def test_a_few_documents_are_at_fault_if_the_index_took_others(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    index(make_rows([{"n": 5000}], offsets=[5000]))
    elasticsearch.item_fault = refuses(*range(17))
    assert index(make_rows([{"n": n} for n in range(16)])).dead_lettered == 16
    with pytest.raises(ElasticsearchRefusedError, match="refuses all 17 documents"):
        index(make_rows([{"n": n} for n in range(17)]))
    elasticsearch.item_fault = refuses(0, kind="of_a_later_version")
    with pytest.raises(ElasticsearchRefusedError, match="of_a_later_version"):
        index(make_rows([{"n": 0}]))


def test_running_again_changes_nothing(index: Index, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    rows = make_rows([{"n": 1}, b"junk", None, {"n": 2}])
    index(rows)
    before = dict(elasticsearch.documents("clicks")), dict(elasticsearch.versions("clicks"))
    letters = dict(elasticsearch.documents(LETTERS))
    counts = index(rows)
    assert (counts.repeated, counts.created, counts.dead_lettered) == (2, 0, 2)
    assert (elasticsearch.documents("clicks"), elasticsearch.versions("clicks")) == before
    assert elasticsearch.documents(LETTERS) == letters


def test_a_dead_letter_has_everything_to_repeat_the_record(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    headers = pa.array(
        [[{"key": "h", "value": b"\xff"}]], pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    )
    more = {"headers": headers, "timestamp": pa.array([1_650_123], pa.timestamp("us", tz="UTC"))}
    rows = make_rows([b"\xe9junk"], offsets=[7], keys=[b"k"], incarnations=[2], **more)
    index(rows, stream_name="s", output_id="o", batch_time_ms=1700)
    assert elasticsearch.documents(LETTERS) == {
        "s/o/clicks/t+0+7+2": {
            "stream": "s",
            "output": "o",
            "batch_time": 1700,
            "index": "clicks",
            "topic": "t",
            "partition": 0,
            "offset": 7,
            "incarnation": 2,
            "reason": {
                "type": "malformed_document",
                "text": "the document is not UTF-8: invalid continuation byte at byte 0",
            },
            "key": base64.b64encode(b"k").decode(),
            "value": base64.b64encode(b"\xe9junk").decode(),
            "value_bytes": 5,
            "value_is_document": True,
            "document_id": "t+0+7+2",
            "timestamp": 1650,
            "headers": [{"key": "h", "value": base64.b64encode(b"\xff").decode()}],
        }
    }


def test_a_dead_letter_has_a_utf8_value_as_text(index: Index, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    index(make_rows([b"junk"]))
    assert elasticsearch.documents(LETTERS)["clicks/t+0+0"]["value_text"] == "junk"


def rejecting(action: Action) -> tuple[int, str, str] | None:
    bad = isinstance(action.document, dict) and action.document.get("n") == "bad"
    return (400, "document_parsing_exception", "no long") if bad else None


def test_a_transformed_rows_record_is_looked_up(index: Index, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    elasticsearch.item_fault = rejecting
    rows = make_rows([{"n": 1}, {"n": "bad"}]).rename_columns({"value": "document"})
    counts = index(rows, originals=Originals())
    assert (counts.created, counts.dead_lettered) == (1, 1)
    letter = elasticsearch.documents(LETTERS)["clicks/t+0+1"]
    assert letter["value_text"] == "raw t 0 1 1"
    assert letter["document_text"] == '{"n": "bad"}'
    assert letter["headers"] == [{"key": "h", "value": base64.b64encode(b"v").decode()}]


def test_an_aggregates_row_has_no_record(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = rejecting
    rows = pa.record_batch({"g": ["x"], "document": ['{"n": "bad"}']})
    options = {"document_id": "columns", "id_columns": ["g"]}
    index(rows, originals=Originals(), **options)
    index(rows, originals=Originals(), **options)
    ((id_, letter),) = elasticsearch.documents(LETTERS).items()
    assert id_.startswith("clicks/row+")
    assert letter["document_text"] == '{"n": "bad"}'
    assert "topic" not in letter
    assert (letter["document_id"], letter["value_is_document"]) == ("x", False)


def test_a_dead_letter_has_the_id_and_version_of_its_document(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    rejected = pa.array([None, None, "odd"])
    rows = make_rows([b"junk", b"junk", b"{}"], keys=[b"k", b"", b"r"], rejected_because=rejected, offsets=[4, 5, 6])
    index(rows, document_id="key")
    letters = elasticsearch.documents(LETTERS)
    assert (letters["clicks/t+0+4"]["document_id"], letters["clicks/t+0+4"]["version"]) == ("k", 4)
    assert not {"document_id", "version"} & (letters["clicks/t+0+5"].keys() | letters["clicks/t+0+6"].keys())


def test_rows_without_a_record_do_not_share_a_dead_letter(index: Index, elasticsearch: FakeElasticsearch) -> None:
    rows = pa.record_batch({"key": [b"a", b"b", b"b"], "version": [1, 1, 2], "value": [b"junk"] * 3})
    options = {"document_id": "key", "version": "version"}
    index(rows, **options, batch_time_ms=1)
    index(rows, **options, batch_time_ms=1)
    assert len(elasticsearch.documents(LETTERS)) == 3
    index(rows, **options, batch_time_ms=2)
    assert len(elasticsearch.documents(LETTERS)) == 6


def test_rows_of_one_record_do_not_share_a_dead_letter(index: Index, elasticsearch: FakeElasticsearch) -> None:
    elasticsearch.item_fault = rejecting
    coordinates = {"topic": ["t", "t"], "partition": pa.array([0, 0], pa.int32()), "offset": [7, 7]}
    rows = pa.record_batch({**coordinates, "word": ["a", "b"], "document": ['{"n": "bad"}'] * 2})
    for _ in range(2):
        counts = index(
            rows, originals=Originals(), document_id="columns", id_columns=["word"], id_batch_time=True, batch_time_ms=1
        )
        assert counts.dead_lettered == 2
    letters = elasticsearch.documents(LETTERS)
    assert len(letters) == 2
    assert {(letter["topic"], letter["offset"]) for letter in letters.values()} == {("t", 7)}


def test_a_row_rejected_before_is_a_dead_letter_at_once(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    because = pa.array([None, "the value is no JSON", "no user", None])
    rows = make_rows([{"n": 1}, b"junk", None, None], rejected_because=because)
    counts = index(rows, tombstones="ignore")
    assert (counts.created, counts.dead_lettered, counts.ignored_tombstones) == (1, 2, 1)
    letters = elasticsearch.documents(LETTERS)
    assert letters["clicks/t+0+1"]["reason"] == {"type": "rejected", "text": "the value is no JSON"}
    assert letters["clicks/t+0+2"]["reason"] == {"type": "rejected", "text": "no user"}


def test_what_succeeds_on_a_retry_has_no_dead_letter(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    first = iter([True])

    def fault(action: Action) -> tuple[int, str, str] | None:
        return (503, "unavailable_shards_exception", "") if action.id == "t+0+0" and next(first, False) else None

    elasticsearch.item_fault = fault
    counts = index(make_rows([{"n": 1}, {"n": 2}]))
    assert (counts.created, counts.dead_lettered) == (2, 0)
    assert LETTERS not in elasticsearch.indices


def test_a_batch_whose_dead_letters_are_refused_fails(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.item_fault = lambda a: (
        (400, "strict_dynamic_mapping_exception", "no") if "reason" in a.document else None
    )
    with pytest.raises(DeadLettersRefusedError, match="strict_dynamic_mapping_exception"):
        index(make_rows([b"junk"]))


def test_a_batch_whose_dead_letters_find_no_elasticsearch_fails(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    def down(actions: Sequence[Action]) -> NoAnswerError | None:
        return NoAnswerError("gone") if "reason" in actions[0].document else None

    elasticsearch.standing_fault = down
    with pytest.raises(ElasticsearchUnavailableError, match=LETTERS):
        index(make_rows([b"junk", {"n": 1}]))


def test_a_dead_letter_that_is_too_large_has_no_value(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    def small_only(actions: Sequence[Action]) -> Response | None:
        return Response(413, b"") if any(len(action.raw) > 1000 for action in actions) else None

    elasticsearch.standing_fault = small_only
    counts = index(make_rows([{"n": "x" * 2000}, {"n": 1}, b"junk"]))
    assert counts.dead_letter_reasons == {"document_too_large": 1, "malformed_document": 1}
    letters = elasticsearch.documents(LETTERS)
    assert "value" not in letters["clicks/t+0+0"]
    assert letters["clicks/t+0+0"]["value_bytes"] > 2000
    assert letters["clicks/t+0+2"]["value_text"] == "junk"


def test_many_dead_letters_are_written_in_several_requests(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    counts = index(make_rows([b"junk"] * 2500), bulk_actions=500)
    assert counts.dead_lettered == 2500
    assert len(elasticsearch.documents(LETTERS)) == 2500


def test_a_missing_dead_letter_index_is_created_with_its_mapping(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    index(make_rows([b"junk"]))
    index(make_rows([b"junk"]))
    assert elasticsearch.requests.count(("PUT", f"/{LETTERS}")) == 1


def test_several_requests_are_in_flight_at_once(
    index: Index, elasticsearch: FakeElasticsearch, make_options: Any, make_rows: Any
) -> None:
    together = threading.Barrier(3, timeout=10)

    class Slow:
        def request(self, method: str, path: str, body: bytes | None = None) -> Response:
            together.wait()
            return elasticsearch.request(method, path, body)

        def close(self) -> None: ...

    options = make_options(bulk_actions=10, requests_in_flight=3)
    counts = Indexer(Slow(), options).index([make_rows([{"n": n} for n in range(60)])])
    assert (counts.created, counts.requests) == (60, 6)


def test_one_failed_request_fails_the_task_with_its_error(
    index: Index, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.faults.append(lambda _: error_response(401, "security_exception", "who are you"))
    with pytest.raises(ElasticsearchRefusedError, match="who are you"):
        index(make_rows([{"n": n} for n in range(100)]), bulk_actions=10, requests_in_flight=4)


def test_columns_that_are_missing_are_named(index: Index, make_rows: Any) -> None:
    with pytest.raises(UnsuitableRowsError, match="'offset'"):
        index(pa.record_batch({"topic": ["t"], "partition": [0], "value": ["{}"]}))
    with pytest.raises(UnsuitableRowsError, match="'key'"):
        index(make_rows([b"{}"]), document_id="key")
    with pytest.raises(UnsuitableRowsError, match="neither 'value' nor 'document'"):
        index(make_rows([b"{}"]).drop_columns(["value"]))


def test_no_request_is_sent_for_no_rows(index: Index, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    assert index().rows == 0
    assert index(make_rows([])).rows == 0
    assert elasticsearch.requests == []


def test_small_batches_are_combined_and_large_ones_are_split(make_options: Any, make_rows: Any) -> None:
    options = make_options(bulk_actions=10)
    small = [make_rows([{"n": n}]) for n in range(25)]
    assert [batch.num_rows for batch in regroup(small, options)] == [10, 10, 5]
    large = make_rows([{"n": "x" * 1000}] * 100)
    tight = make_options(bulk_bytes=2000)
    assert max(batch.num_rows for batch in regroup([large], tight)) <= 9
    assert sum(batch.num_rows for batch in regroup([large], tight)) == 100


SEED = 0xFFFF_FFFF_FFFF_FFFF


def check(options: Any, *batches: Any, seed: int = SEED) -> np.ndarray[Any, Any]:
    checked = DuplicateIdCheck(options, seed)
    for batch in batches:
        checked.take(batch, identify(batch, options))
    return checked.digests()


@pytest.mark.parametrize(
    ("options", "rows", "remedy"),
    [
        ({}, {"offsets": [3, 3]}, r"'t\+0\+3'.*RecordIds\(rows="),
        ({"write_method": "index"}, {"offsets": [3, 3]}, r"'t\+0\+3'.*RecordIds\(rows="),
        ({"id_columns": ["line"]}, {"offsets": [3, 3], "line": pa.array([7, 7])}, r"'t\+0\+3~7'"),
        ({"document_id": "key"}, {"offsets": [3, 3], "keys": [b"k", b"k"]}, r"'k'.*version_from"),
        # Of topics of one name in two clusters, or two of one record: without the column it is not known which.
        (
            {"document_id": "key", "version": "version"},
            {"offsets": [3, 3], "keys": [b"k", b"k"], "version": pa.array([5, 5]), "incarnations": [0, 0]},
            r"'k'.*keep the column incarnation",
        ),
        ({"document_id": "columns", "id_columns": ["g"]}, {"g": ["x", "x"]}, r"'x'.*dropDuplicates"),
    ],
)
def test_rows_with_one_id_are_refused_before_they_are_sent(
    make_options: Any, make_rows: Any, options: dict[str, str], rows: dict[str, Any], remedy: str
) -> None:
    elasticsearch = FakeElasticsearch()
    batch = make_rows([{"n": 1}, {"n": 2}], **rows)
    with pytest.raises(DuplicateIdsError, match=remedy):
        Indexer(elasticsearch, make_options(**options)).index([batch])
    assert not elasticsearch.bulks


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, {"offsets": [3, 3], "incarnations": [1, 2]}),
        ({"id_columns": ["line"]}, {"offsets": [3, 3], "line": pa.array([7, 8])}),
        # Later values of a key, and records of one time.
        ({"document_id": "key"}, {"offsets": [3, 4], "keys": [b"k", b"k"]}),
        (
            {"document_id": "key", "version": "version"},
            {"offsets": [3, 4], "keys": [b"k", b"k"], "version": pa.array([5, 5])},
        ),
        # The records of mirrored topics, and of topics of one name in two clusters.
        (
            {"document_id": "key", "version": "version"},
            {
                "offsets": [3, 3],
                "keys": [b"k", b"k"],
                "version": pa.array([5, 5]),
                "topic": pa.array(["east.t", "west.t"]),
            },
        ),
        (
            {"document_id": "key", "version": "version"},
            {"offsets": [3, 3], "keys": [b"k", b"k"], "version": pa.array([5, 5]), "incarnations": [1, 2]},
        ),
        # Dead letters without an id.
        ({"document_id": "key"}, {"offsets": [3, 4], "keys": [None, None]}),
    ],
)
def test_rows_of_one_id_with_different_versions_are_allowed(
    make_options: Any, make_rows: Any, options: dict[str, str], rows: dict[str, Any]
) -> None:
    digests = check(make_options(**options), make_rows([b"{}", b"{}"], **rows))
    assert repeated_digests([digests]) == 0


def test_two_rows_of_one_record_with_one_key_are_refused(make_options: Any, make_rows: Any) -> None:
    """They are refused whatever their versions are."""
    options = make_options(document_id="key", version="version")
    with pytest.raises(DuplicateIdsError):
        check(options, make_rows([b"{}", b"{}"], offsets=[3, 3], keys=[b"k", b"k"], version=pa.array([5, 5])))


def test_two_rejected_rows_of_one_record_are_refused_too(make_options: Any, make_rows: Any) -> None:
    """Their dead letters have the record's id, and one may be in another task."""
    with pytest.raises(DuplicateIdsError, match="RecordIds"):
        check(make_options(), make_rows([b"{}", b"{}"], offsets=[3, 3], rejected_because=["odd", "odd"]))


def test_duplicate_ids_of_other_tasks_are_found_by_their_digests(make_options: Any, make_rows: Any) -> None:
    options = make_options()
    tasks = [check(options, make_rows([b"{}"] * 3, offsets=offsets)) for offsets in ([1, 2, 3], [4, 5, 6], [7, 3, 1])]
    assert repeated_digests(tasks) == 2
    assert repeated_digests(tasks[:2]) == 0
    assert repeated_digests([]) == 0
    assert repeated_digests([check(options)]) == 0


def test_digests_depend_on_the_ids_and_on_the_writes_seed(make_options: Any, make_rows: Any) -> None:
    """However the rows are cut, and others with another seed; ids that are alike in most places have different ones."""
    options = make_options(document_id="columns", id_columns=["g"])
    texts = [str(number) for number in range(20_000)]
    texts += [hashlib.sha256(text.encode()).hexdigest() for text in texts] + ["é" * n for n in range(1, 257)]
    rows = pa.record_batch({"g": texts, "document": ["{}"] * len(texts)})
    whole = check(options, rows)
    assert len(np.unique(whole)) == len(texts)
    assert check(options, rows.slice(0, 777), rows.slice(777)).tolist() == whole.tolist()
    assert not np.isin(check(options, rows, seed=1), whole).any()
