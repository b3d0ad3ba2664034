"""The answers are those of Elasticsearch 8.19, as it gave them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.fake_elasticsearch import error_response

from headrace.elasticsearch.transport import Response, error_of
from headrace.elasticsearch.verdicts import (
    Item,
    Reason,
    Whole,
    current_version,
    item_reason,
    judge_item,
    judge_response,
    refusal,
)


def failed(kind: str, reason: str = "") -> dict[str, Any]:
    return {"error": {"type": kind, "reason": reason}}


def illegal(reason: str) -> dict[str, Any]:
    return failed("illegal_argument_exception", reason)


@pytest.mark.parametrize(
    ("status", "item", "verdict"),
    [
        (201, {"result": "created"}, Item.CREATED),
        (200, {"result": "updated"}, Item.UPDATED),
        (200, {"result": "deleted"}, Item.DELETED),
        (404, {"result": "not_found"}, Item.DELETED),
        (409, failed("version_conflict_engine_exception"), Item.CONFLICT),
        (429, failed("es_rejected_execution_exception"), Item.NOT_NOW),
        (503, failed("unavailable_shards_exception"), Item.NOT_NOW),
        (500, failed("exception"), Item.SUSPECT),
        (500, failed("i_o_exception", "No space left on device"), Item.NOT_NOW),
        (500, failed("json_parse_exception"), Item.DOUBTFUL),
        (500, {}, Item.SUSPECT),
        (500, {"result": "created"}, Item.SUSPECT),
        (200, {}, Item.REFUSED),
        (429, {"error": "busy"}, Item.NOT_NOW),
        (429, failed("circuit_breaking_exception"), Item.SUSPECT),
        (503, failed("circuit_breaking_exception"), Item.SUSPECT),
        (429, failed("es_rejected_execution_exception", "rejected ... operation_bytes=9"), Item.SUSPECT),
        (413, {}, Item.SUSPECT),
        (409, failed("resource_already_exists_exception"), Item.REFUSED),
        (401, {}, Item.REFUSED),
        (403, {"error": "forbidden"}, Item.REFUSED),
        (418, failed("teapot_exception"), Item.REFUSED),
        (429, failed("cluster_block_exception", "flood-stage"), Item.NOT_NOW),
        (
            403,
            failed("cluster_block_exception", "index [ro] blocked by: [FORBIDDEN/8/index write (api)];"),
            Item.NOT_NOW,
        ),
        (400, failed("document_parsing_exception"), Item.REJECTED),
        (400, failed("illegal_argument_exception", "Limit of total fields [1000] has been exceeded"), Item.REJECTED),
        (400, failed("strict_dynamic_mapping_exception"), Item.REJECTED),
        (400, failed("fail_processor_exception", "no user"), Item.REJECTED),
        (400, illegal("mapper [n] cannot be changed from type [long] to [text]"), Item.REJECTED),
        (400, illegal('Document contains at least one immense term in field="f" (whose'), Item.REJECTED),
        (400, illegal("Limit of mapping depth [2] has been exceeded due to object field [g.h]"), Item.REJECTED),
        (400, illegal("unable to convert [many] to integer"), Item.REJECTED),
        (400, illegal("Number of documents in the index can't exceed [2147483519]"), Item.REFUSED),
        (400, illegal("number of documents in the index cannot exceed 2147483519 (current"), Item.REFUSED),
        (400, illegal("Number of documents in the shard cannot exceed [2147483519]; for more"), Item.REFUSED),
        (400, illegal("Malformed content, found extra data after parsing: END_OBJECT"), Item.REJECTED),
        (400, illegal("Field name [ffff] is longer than the limit of [3] characters"), Item.REJECTED),
        (400, illegal("pipeline with id [p] does not exist"), Item.REFUSED),
        (400, illegal("only write ops with an op_type of create are allowed in data streams"), Item.REFUSED),
        (400, illegal("what a later version may say of [mapper [n] cannot be changed from type]"), Item.DOUBTFUL),
        (400, failed("routing_missing_exception", "routing is required for [i]/[1]"), Item.REFUSED),
        (400, failed("script_exception", "runtime error"), Item.DOUBTFUL),
        (400, failed("an_exception_of_a_later_version"), Item.DOUBTFUL),
        (400, {"error": "no object"}, Item.REFUSED),
        (500, failed("class_cast_exception", "String cannot be cast to Map"), Item.DOUBTFUL),
        (500, failed("illegal_state_exception"), Item.SUSPECT),
        (405, failed("document_parsing_exception"), Item.REFUSED),
        (404, failed("index_not_found_exception"), Item.REFUSED),
        (403, failed("security_exception"), Item.REFUSED),
        (400, failed("index_closed_exception", "closed"), Item.REFUSED),
        (400, failed("validation_exception", "this action would add [2] shards"), Item.REFUSED),
        (400, failed("invalid_index_name_exception"), Item.REFUSED),
        (400, failed("illegal_argument_exception", "no write index is defined for alias [two]. The"), Item.REFUSED),
    ],
)
def test_each_item_of_a_bulk_answer_has_its_verdict(status: int, item: dict[str, Any], verdict: Item) -> None:
    assert judge_item(status, item) is verdict


@pytest.mark.parametrize(
    ("status", "kind", "verdict"),
    [
        (200, "", Whole.READ_ITEMS),
        (429, "es_rejected_execution_exception", Whole.NOT_NOW),
        (502, "", Whole.NOT_NOW),
        (500, "illegal_state_exception", Whole.SUSPECT),
        (500, "i_o_exception", Whole.NOT_NOW),
        (500, "security_exception", Whole.REFUSED),
        (429, "circuit_breaking_exception", Whole.SUSPECT),
        (403, "cluster_block_exception", Whole.NOT_NOW),
        (413, "", Whole.TOO_LARGE),
        (400, "action_request_validation_exception", Whole.INVALID),
        (400, "invalid_index_name_exception", Whole.REFUSED),
        (401, "security_exception", Whole.REFUSED),
        (403, "security_exception", Whole.REFUSED),
        (404, "index_not_found_exception", Whole.REFUSED),
        (302, "", Whole.REFUSED),
    ],
)
def test_each_answer_to_a_whole_request_has_its_verdict(status: int, kind: str, verdict: Whole) -> None:
    assert judge_response(error_response(status, kind, "why")) is verdict


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (Reason("illegal_argument_exception", "Number of documents in the index can't exceed [9]"), "is full"),
        (Reason("routing_missing_exception", "routing is required"), "take _routing out of the mapping"),
        (Reason("illegal_argument_exception", "pipeline with id [p] does not exist"), "Create the pipeline"),
        (Reason("illegal_argument_exception", "no write index is defined for alias [a]"), "its write index"),
        (Reason("new_exception", "?"), "rejected_because"),
    ],
)
def test_a_refusal_names_a_remedy(reason: Reason, remedy: str) -> None:
    assert remedy in str(refusal(400, reason, "clicks"))


def test_a_conflicts_text_ends_with_the_current_version() -> None:
    text = (
        "[a current version [99] b]: version conflict, current version [12] is higher or equal to the one provided [3]"
    )
    assert current_version(Reason("version_conflict_engine_exception", text)) == 12
    assert current_version(Reason("version_conflict_engine_exception", "something else")) is None


def test_a_reason_includes_the_deeper_cause() -> None:
    item = {"error": {"type": "t", "reason": "failed to parse", "caused_by": {"reason": 'For input string: "x"'}}}
    assert item_reason(item).text == 'failed to parse: For input string: "x"'


def test_a_reason_that_quotes_a_lone_surrogate_can_be_written() -> None:
    """As of ``{"a": "\\ud800"}``, whose ``a`` is no date. Spark's worker could not report such an error."""
    quoting = json.loads('{"error": {"type": "document_parsing_exception", "reason": "no date: \\ud800 x"}}')
    for reason in (item_reason(quoting), Reason(*error_of(quoting, ""))):
        assert str(reason).encode() == b"document_parsing_exception: no date: ? x"


def test_the_reason_of_a_refused_search_is_that_of_its_shards() -> None:
    response = Response(
        400,
        b'{"error":{"root_cause":[{"type":"illegal_argument_exception","reason":"Fielddata is disabled on [topic]"}],'
        b'"type":"search_phase_execution_exception","reason":"all shards failed"},"status":400}',
    )
    assert response.error() == (
        "search_phase_execution_exception",
        "all shards failed: Fielddata is disabled on [topic]",
    )
