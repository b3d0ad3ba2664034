from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import Action, FakeElasticsearch, Stored, error_response

from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.bulk_sender import MAX_OFFENDERS, BulkSender, SentRequest
from headrace.elasticsearch.counts import HeldVersion, IndexingCounts
from headrace.elasticsearch.errors import (
    ElasticsearchRefusedError,
    ElasticsearchUnavailableError,
    IndexingCancelledError,
)
from headrace.elasticsearch.transport import NoAnswerError, Response

Send = Callable[..., SentRequest]


@pytest.fixture
def send(elasticsearch: FakeElasticsearch, make_options: Any, clock: Any) -> Send:
    def send_rows(rows: Any, *, cancelled: threading.Event | None = None, **options: Any) -> SentRequest:
        chosen = make_options(**options)
        sender = BulkSender(elasticsearch, chosen, clock=clock, cancelled=cancelled or threading.Event())
        prepared = prepare_rows(rows, chosen).prepared
        assert prepared is not None
        return sender.send(prepared, np.arange(len(prepared)))

    return send_rows


def no_answer(_: Sequence[Action]) -> NoAnswerError:
    return NoAnswerError("timed out")


def busy(_: Sequence[Action]) -> Response:
    return error_response(429, "es_rejected_execution_exception", "queue is full")


def once(ids: set[str], status: int, kind: str) -> Callable[[Action], tuple[int, str, str] | None]:
    left = set(ids)

    def fault(action: Action) -> tuple[int, str, str] | None:
        if action.id not in left:
            return None
        left.discard(action.id)
        return status, kind, "not now"

    return fault


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_new_documents_are_counted_however_the_answer_is_written(
    send: Send, make_rows: Any, elasticsearch: FakeElasticsearch, separators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = FakeElasticsearch.request

    def request(*args: Any) -> Response:
        answer = asked(*args)
        return Response(answer.status, json.dumps(json.loads(answer.body), separators=separators).encode())

    monkeypatch.setattr(FakeElasticsearch, "request", request)
    assert send(make_rows([{"n": 0}, {"n": 1}])).counts.created == 2
    assert send(make_rows([{"n": 0}, {"n": 1}, {"n": 2}])).counts.created == 1


def test_documents_are_indexed(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    sent = send(make_rows([{"n": 0}, {"n": 1}]))
    assert elasticsearch.documents("clicks") == {"t+0+0": {"n": 0}, "t+0+1": {"n": 1}}
    assert (sent.counts.created, sent.counts.requests, sent.counts.retries) == (2, 1, 0)
    assert sent.counts.bytes == 2 * len(b'{"create":{"_id":"t+0+0"}}\n{"n": 0}\n')


def test_sending_again_changes_nothing(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    send(make_rows([{"n": 0}, {"n": 1}]))
    before = elasticsearch.versions("clicks")
    sent = send(make_rows([{"n": 0}, {"n": 1}]))
    assert (sent.counts.created, sent.counts.repeated, sent.counts.superseded) == (0, 2, 0)
    assert elasticsearch.versions("clicks") == before


def test_write_method_index_replaces_a_changed_document(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    send(make_rows([{"n": 0}]))
    sent = send(make_rows([{"n": "new"}]), write_method="index")
    assert sent.counts.updated == 1
    assert elasticsearch.documents("clicks") == {"t+0+0": {"n": "new"}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, "es_rejected_execution_exception"),
        (503, "unavailable_shards_exception"),
        (500, "exception"),
        (403, "cluster_block_exception"),
    ],
)
def test_only_the_failed_items_are_sent_again(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, status: int, kind: str
) -> None:
    elasticsearch.item_fault = once({"t+0+1", "t+0+3"}, status, kind)
    sent = send(make_rows([{"n": n} for n in range(5)]))
    assert [[action.id for action in actions] for _, actions in elasticsearch.bulks] == [
        ["t+0+0", "t+0+1", "t+0+2", "t+0+3", "t+0+4"],
        ["t+0+1", "t+0+3"],
    ]
    assert (sent.counts.created, sent.rejected) == (5, [])
    assert (sent.counts.retries, sent.counts.throttled_requests) == ((0, 1) if status == 429 else (1, 0))


def test_a_request_without_an_answer_is_sent_again(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.faults.extend([no_answer, busy, no_answer])
    sent = send(make_rows([{"n": 0}]))
    assert (sent.counts.created, sent.counts.requests) == (1, 4)
    assert (sent.counts.retries, sent.counts.throttled_requests) == (2, 1)


def test_a_lost_answer_is_not_a_second_document(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    elasticsearch.answer_lost.append(True)
    sent = send(make_rows([{"n": 0}, {"n": 1}]))
    assert sent.counts.repeated == 2
    assert len(elasticsearch.documents("clicks")) == 2
    assert set(elasticsearch.versions("clicks").values()) == {1}


@pytest.mark.parametrize(
    ("fault", "setting", "answer"),
    [(no_answer, "max_retry_seconds", "timed out"), (busy, "max_throttled_seconds", "queue is full")],
)
def test_waits_between_tries_grow_with_jitter_up_to_a_bound(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, clock: Any, *, fault: Any, setting: str, answer: str
) -> None:
    elasticsearch.standing_fault = fault
    with pytest.raises(ElasticsearchUnavailableError, match=rf"{answer}.*Nothing was dropped.*'{setting}'"):
        send(make_rows([{"n": 0}]), **{setting: 120})
    ceilings = [min(30.0, 0.1 * 2**n) for n in range(len(clock.waits))]
    assert all(0 <= wait <= ceiling for wait, ceiling in zip(clock.waits, ceilings, strict=True))
    assert len(set(clock.waits)) > 3
    assert 119 <= clock.monotonic() <= 122


@pytest.mark.parametrize(
    ("fault", "status", "setting"),
    [(no_answer, 503, "max_retry_seconds"), (busy, 429, "max_throttled_seconds")],
)
def test_progress_starts_the_retry_time_again(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, clock: Any, *, fault: Any, status: int, setting: str
) -> None:
    def one_try_in_thirty(actions: Sequence[Action]) -> Response | None:
        return None if len(elasticsearch.bulks) % 30 == 0 else fault(actions)

    def only_the_first_item(action: Action) -> tuple[int, str, str] | None:
        _, actions = elasticsearch.bulks[-1]
        return None if action.id == actions[0].id else (status, "es_rejected_execution_exception", "busy")

    elasticsearch.standing_fault, elasticsearch.item_fault = one_try_in_thirty, only_the_first_item
    sent = send(make_rows([{"n": n} for n in range(4)]), **{setting: 900})
    assert sent.counts.created == 4
    assert clock.monotonic() > 900


def test_a_bad_document_is_rejected_and_the_rest_indexed(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    def mapping(action: Action) -> tuple[int, str, str] | None:
        return (400, "document_parsing_exception", "no long") if action.document["n"] == "x" else None

    elasticsearch.item_fault = mapping
    sent = send(make_rows([{"n": 1}, {"n": "x"}, {"n": 2}]))
    assert [(line, str(reason)) for line, reason in sent.rejected] == [(1, "document_parsing_exception: no long")]
    assert sent.counts.created == 2


def test_what_succeeds_on_a_retry_is_not_rejected(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    elasticsearch.item_fault = once({"t+0+0"}, 503, "unavailable_shards_exception")
    elasticsearch.faults.append(no_answer)
    sent = send(make_rows([{"n": 0}, {"n": 1}]))
    assert sent.rejected == []
    assert sent.counts.created == 2


def invalid_if(bad: Callable[[Action], bool]) -> Callable[[Sequence[Action]], Response | None]:
    def fault(actions: Sequence[Action]) -> Response | None:
        if any(bad(action) for action in actions):
            return error_response(400, "action_request_validation_exception", "Validation Failed")
        return None

    return fault


def test_a_refused_request_is_bisected_to_its_offenders(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.standing_fault = invalid_if(lambda action: action.document["n"] in (3, 60))
    sent = send(make_rows([{"n": n} for n in range(100)]))
    assert sorted(line for line, _ in sent.rejected) == [3, 60]
    assert {reason.type for _, reason in sent.rejected} == {"action_request_validation_exception"}
    assert sent.counts.created == 98
    assert sent.counts.requests < 35


def test_a_setting_that_spoils_every_request_fails_the_batch(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """The batch makes few dead letters."""
    elasticsearch.standing_fault = invalid_if(lambda _: True)
    with pytest.raises(ElasticsearchRefusedError, match="Validation Failed"):
        send(make_rows([{"n": n} for n in range(100)]))
    with pytest.raises(ElasticsearchRefusedError):
        send(make_rows([{"n": n} for n in range(3)]))


def test_one_invalid_document_above_the_limit_fails_the_batch(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """As many invalid documents as the limit are rejected."""
    rows = make_rows([{"n": n} for n in range(100)])
    elasticsearch.standing_fault = invalid_if(lambda action: action.document["n"] < MAX_OFFENDERS)
    assert len(send(rows).rejected) == MAX_OFFENDERS
    elasticsearch.standing_fault = invalid_if(lambda action: action.document["n"] <= MAX_OFFENDERS)
    with pytest.raises(ElasticsearchRefusedError):
        send(rows)


def test_too_large_a_request_is_split(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    def at_most_two(actions: Sequence[Action]) -> Response | None:
        return Response(413, b"") if len(actions) > 2 or actions[0].document["n"] == 4 else None

    elasticsearch.standing_fault = at_most_two
    sent = send(make_rows([{"n": n} for n in range(8)]))
    assert [(line, reason.type) for line, reason in sent.rejected] == [(4, "document_too_large")]
    assert sent.counts.created == 7


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ((401, "security_exception"), "login"),
        ((403, "security_exception"), "privileges"),
        ((404, "index_not_found_exception"), "auto_create_index"),
        ((400, "invalid_index_name_exception"), "Nothing was dropped"),
    ],
)
def test_an_error_that_a_retry_cannot_correct_fails_at_once(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, answer: tuple[int, str], remedy: str
) -> None:
    elasticsearch.faults.append(lambda _: error_response(*answer, "why"))
    with pytest.raises(ElasticsearchRefusedError, match=remedy):
        send(make_rows([{"n": 0}]))
    assert len(elasticsearch.bulks) == 1


def test_an_items_error_about_the_index_fails_the_batch(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    elasticsearch.item_fault = lambda _: (404, "index_not_found_exception", "no such index [clicks]")
    with pytest.raises(ElasticsearchRefusedError, match="Create the index"):
        send(make_rows([{"n": 0}]))


@pytest.mark.parametrize("body", [b"<html>login</html>", b"{}", b'{"items":[]}', b'{"items":[{"create":{"status":201'])
def test_an_answer_that_is_no_bulk_answer_is_no_success(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, body: bytes
) -> None:
    elasticsearch.faults.append(lambda _: Response(200, body))
    assert send(make_rows([{"n": 0}])).counts.created == 1


def test_a_cancelled_request_stops_waiting(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    elasticsearch.standing_fault = busy
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(IndexingCancelledError):
        send(make_rows([{"n": 0}]), cancelled=cancelled)


KEY = {"document_id": "key"}


def test_a_key_holds_its_latest_value_in_any_order(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    newer = make_rows([{"n": "new"}], keys=[b"k"], offsets=[9])
    older = make_rows([{"n": "old"}], keys=[b"k"], offsets=[5])
    assert send(newer, **KEY).counts.created == 1
    assert send(older, **KEY).counts.superseded == 1
    assert send(newer, **KEY).counts.repeated == 1
    assert elasticsearch.documents("clicks") == {"k": {"n": "new"}}
    assert elasticsearch.versions("clicks") == {"k": 9}


def test_a_tombstone_deletes_what_is_older(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    send(make_rows([{"n": 1}], keys=[b"k"], offsets=[5]), **KEY)
    tombstone = make_rows([None], keys=[b"k"], offsets=[6])
    assert send(tombstone, **KEY).counts.deleted == 1
    assert send(tombstone, **KEY).counts.repeated == 1
    assert send(make_rows([{"n": 1}], keys=[b"k"], offsets=[5]), **KEY).counts.superseded == 1
    assert elasticsearch.documents("clicks") == {}


def test_a_tombstone_of_an_unknown_key_counts_as_deleted(send: Send, make_rows: Any) -> None:
    assert send(make_rows([None], keys=[b"k"]), **KEY).counts.deleted == 1


def test_another_record_of_the_same_version_is_not_repeated(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """The version is a named column's."""
    by_column = {**KEY, "version": "version"}
    first = make_rows([{"n": 1}], keys=[b"k"], version=pa.array([7]))
    other = make_rows([{"n": 2}], keys=[b"k"], version=pa.array([7]))
    assert send(first, **by_column).counts.created == 1
    assert send(first, **by_column).counts.repeated == 1
    assert send(other, **by_column).counts.superseded == 1


def test_another_row_of_the_same_group_is_not_repeated(send: Send, make_rows: Any) -> None:
    options = {"document_id": "columns", "id_columns": ["g"], "id_batch_time": True, "batch_time_ms": 1}
    first = make_rows([{"n": 1}], g=["x"])
    other = make_rows([{"n": 2}], g=["x"])
    assert send(first, **options).counts.created == 1
    assert send(first, **options).counts.repeated == 1
    assert send(other, **options).counts.foreign == 1
    assert send(other, **options, written_before=True).counts.kept == 1


def test_a_record_is_repeated_if_the_index_has_the_same_document(send: Send, make_rows: Any) -> None:
    """Whatever is there under a record's id was compared with it; the id alone proves nothing."""
    send(make_rows([{"n": 1}, {"n": 2.0, "deep": {"a": [1]}}]))
    again = send(make_rows([b'{"n":1}', b'{"deep": {"a": [1]}, "n": 2.0}', {"n": 3}]))
    assert (again.counts.repeated, again.counts.created, again.counts.foreign) == (2, 1, 0)
    other = send(make_rows([{"n": 1}, {"n": 5}, {"n": 6}]))
    assert (other.counts.repeated, other.counts.foreign) == (1, 2)
    assert other.counts.foreign_ids == ["t+0+1", "t+0+2"]
    later = send(make_rows([{"n": 1}, {"n": 5}, {"n": 6}]), written_before=True)
    assert (later.counts.repeated, later.counts.kept, later.counts.foreign_ids) == (1, 2, [])


@pytest.mark.parametrize(("held", "sent"), [(b"1", b"true"), (b"1", b"1.0"), (b"[0]", b"[false]"), (b"1", b'"1"')])
def test_values_of_other_types_are_not_the_same(send: Send, make_rows: Any, held: bytes, sent: bytes) -> None:
    send(make_rows([b'{"n": {"m": %b}}' % held]))
    assert send(make_rows([b'{"n": {"m": %b}}' % sent]), written_before=True).counts.kept == 1


def test_a_document_deleted_after_its_conflict_is_sent_again(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    conflict = once({"t+0+0"}, 409, "version_conflict_engine_exception")
    elasticsearch.item_fault = conflict
    counts = send(make_rows([{"n": 1}, {"n": 2}])).counts
    assert (counts.created, counts.superseded, counts.uncompared) == (2, 0, 0)


def test_documents_that_are_sent_again_get_their_own_answers(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """The conflicts of a second try come after those of the first."""
    tries: Counter[str] = Counter()
    answers = {"t+0+0": [409], "t+0+1": [429, 409], "t+0+2": [409], "t+0+3": [429, 409]}

    def fault(action: Action) -> tuple[int, str, str] | None:
        tries[action.id] += 1
        status = next(iter(answers[action.id][tries[action.id] - 1 :]), None)
        return None if status is None else (status, "version_conflict_engine_exception", "not now")

    elasticsearch.item_fault = fault
    counts = send(make_rows([{"n": n} for n in range(4)])).counts
    assert (counts.created, counts.uncompared) == (4, 0)


def test_a_document_that_cannot_be_found_is_not_superseded(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """The document is there, since its write met a conflict."""
    elasticsearch.item_fault = lambda _: (409, "version_conflict_engine_exception", "exists")
    counts = send(make_rows([{"n": 1}])).counts
    assert (counts.uncompared, counts.superseded, counts.requests) == (1, 0, 2)


def test_a_key_at_an_equal_offset_elsewhere_is_not_repeated(send: Send, make_rows: Any) -> None:
    """The key is at the same offset of another partition."""
    send(make_rows([{"n": 1}], keys=[b"a"], offsets=[5]), **KEY)
    assert send(make_rows([{"n": 2}], keys=[b"a"], offsets=[5]), **KEY).counts.foreign_ids == ["a"]


def test_a_document_whose_answer_was_lost_is_not_foreign(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """Though an ingest pipeline has changed it, so that it is not what was sent."""
    elasticsearch.answer_lost.append(True)
    rows = make_rows([{"n": 1}])
    sent_bulk = elasticsearch._carry_out

    def through_a_pipeline(index: str, action: Any) -> Any:
        answer = sent_bulk(index, action)
        elasticsearch.indices[index][action.id].document = {"n": 1, "ingested": "now"}
        return answer

    elasticsearch._carry_out = through_a_pipeline  # type: ignore[method-assign]
    counts = send(rows).counts
    assert (counts.kept, counts.foreign) == (1, 0)


def test_a_document_that_a_pipeline_drops_is_not_written(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    written = elasticsearch._carry_out

    def dropping(index: str, action: Any) -> Any:
        return {"_id": action.id, "result": "noop", "status": 200} if action.id == "t+0+1" else written(index, action)

    elasticsearch._carry_out = dropping  # type: ignore[method-assign]
    counts = send(make_rows([{"n": 1}, {"n": 2}, {"n": 3}])).counts
    assert (counts.created, counts.updated, counts.dropped) == (2, 0, 1)


@pytest.mark.parametrize("place", [{"_index": "other"}, {"_id": "other"}])
@pytest.mark.parametrize("others", [0, 1])
def test_an_answer_that_names_another_place_is_refused(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, place: dict[str, str], others: int
) -> None:
    written = elasticsearch._carry_out
    moved = f"t+0+{others}"
    elasticsearch._carry_out = lambda index, action: {  # type: ignore[method-assign]
        **written(index, action),
        **(place if action.id == moved else {}),
    }
    with pytest.raises(ElasticsearchRefusedError, match="an ingest pipeline changes _index or _id"):
        send(make_rows([{"n": n} for n in range(others + 1)]))


def test_the_index_of_an_alias_is_the_place_asked_for(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    written = elasticsearch._carry_out
    elasticsearch._carry_out = lambda index, action: {  # type: ignore[method-assign]
        **written(index, action),
        "_index": "clicks-1",
    }
    elasticsearch.descriptions["clicks"] = {"clicks-1": {"aliases": {"clicks": {}}}}
    assert send(make_rows([{"n": 1}, {"n": 2}])).counts.created == 2
    assert send(make_rows([{"n": 1}])).counts.repeated == 1


@pytest.mark.parametrize(("status", "kept"), [(429, 0), (503, 1)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_request_rejected_with_429_has_written_nothing(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any, *, status: int, kept: int, whole: bool
) -> None:
    send(make_rows([{"n": 1}]))
    if whole:
        elasticsearch.faults.append(
            lambda _: error_response(status, "es_rejected_execution_exception", "queue is full")
        )
    else:
        elasticsearch.item_fault = once({"t+0+0"}, status, "es_rejected_execution_exception")
    counts = send(make_rows([{"n": 2}])).counts
    assert counts.retries + counts.throttled_requests == 1
    assert (counts.kept, counts.foreign) == (kept, 1 - kept)


def test_a_conflict_is_judged_by_its_own_document_only(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    send(make_rows([{"n": 1}, {"n": 1}, {"n": 1}]))
    elasticsearch.item_fault = once({"t+0+1"}, 503, "unavailable_shards_exception")
    counts = send(make_rows([{"n": 2}, {"n": 2}, {"n": 2}])).counts
    assert (counts.kept, counts.foreign_ids) == (1, ["t+0+0", "t+0+2"])


def test_a_fetch_of_conflicts_is_bounded_in_bytes(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    rows = make_rows([{"n": "x" * 400}] * 20)
    send(rows)
    elasticsearch.requests.clear()
    assert send(rows, bulk_bytes=2000).counts.repeated == 20
    assert [path for _, path in elasticsearch.requests].count("/clicks/_mget") >= 5


def test_a_document_whose_shard_is_unavailable_is_fetched_again(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """Elasticsearch answers with 200 and an error in the entry, which does not say that there is no document."""
    send(make_rows([{"n": 1}, {"n": 2}, {"n": 3}]))
    elasticsearch.requests.clear()
    elasticsearch.not_fetched += [{"t+0+0", "t+0+1", "t+0+2"}, {"t+0+1"}]
    counts = send(make_rows([{"n": 1}, {"n": 2}, {"n": 3}])).counts
    assert (counts.repeated, counts.superseded) == (3, 0)
    assert [path for _, path in elasticsearch.requests].count("/clicks/_mget") == 3


def test_an_unreadable_document_does_not_keep_others_unsettled(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    rows = make_rows([{"n": n} for n in range(9)])
    send(rows)
    elasticsearch.unreadable = {"t+0+4"}
    counts = send(rows).counts
    assert (counts.repeated, counts.uncompared, counts.foreign) == (8, 1, 0)


def test_documents_not_fetched_for_too_long_fail_the_write(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    send(make_rows([{"n": 1}]))
    elasticsearch.not_fetched += [{"t+0+0"}] * 100
    with pytest.raises(ElasticsearchUnavailableError, match="1 of 1 documents cannot be fetched: no_shard_available"):
        send(make_rows([{"n": 1}]), max_retry_seconds=0)


def test_an_unreadable_conflict_is_looked_up(send: Send, elasticsearch: FakeElasticsearch, make_rows: Any) -> None:
    send(make_rows([{"n": 1}, {"n": 2}], keys=[b"a", b"b"], offsets=[5, 9]), **KEY)
    elasticsearch.item_fault = lambda _: (409, "version_conflict_engine_exception", "in other words")
    sent = send(make_rows([{"n": 1}, {"n": 0}], keys=[b"a", b"b"], offsets=[5, 6]), **KEY)
    assert (sent.counts.repeated, sent.counts.superseded) == (1, 1)


def test_the_highest_version_in_the_index_is_kept_per_partition(
    send: Send, elasticsearch: FakeElasticsearch, make_rows: Any
) -> None:
    """Deletions meet versions too. What a column counts is the user's."""
    elasticsearch.indices["clicks"] = {key: Stored(version, {}) for key, version in (("a", 70), ("b", 90), ("c", 80))}
    rows = make_rows([{"n": 1}, {"n": 2}, None], keys=[b"a", b"b", b"c"], offsets=[1, 2, 3])
    first = send(rows, **KEY).counts
    assert (first.superseded, first.held) == (3, {"t-0": HeldVersion(90, "b")})
    second = IndexingCounts(held={"t-0": HeldVersion(95, "z"), "t-1": HeldVersion(1, "y")})
    second.add(IndexingCounts.from_dict(json.loads(json.dumps(first.to_dict()))))
    assert second.held == {"t-0": HeldVersion(95, "z"), "t-1": HeldVersion(1, "y")}
    assert send(make_rows([{"n": 1}], keys=[b"a"], version=pa.array([1])), **KEY, version="version").counts.held == {}
    by_batch = {"document_id": "columns", "id_columns": ["key"], "batch_time_ms": 50}
    assert send(make_rows([{"n": 1}], keys=[b"a"]), **by_batch).counts.held == {"": HeldVersion(70, "a")}
