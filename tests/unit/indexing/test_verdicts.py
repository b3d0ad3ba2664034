"""The answers are those of Elasticsearch 8.19, as it gave them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.indexing.verdicts import Item, Reason, Whole, current_version, item_reason, judge_item, judge_response
from headrace.testing.fake_elasticsearch import error_response


def failed(kind: str, reason: str = "") -> dict[str, Any]:
    return {"error": {"type": kind, "reason": reason}}


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
        (500, failed("exception"), Item.NOT_NOW),
        (429, failed("cluster_block_exception", "flood-stage"), Item.NOT_NOW),
        (
            403,
            failed("cluster_block_exception", "index [ro] blocked by: [FORBIDDEN/8/index write (api)];"),
            Item.NOT_NOW,
        ),
        (400, failed("document_parsing_exception"), Item.REJECTED),
        (400, failed("illegal_argument_exception", "Limit of total fields [1000] has been exceeded"), Item.REJECTED),
        (404, failed("index_not_found_exception"), Item.REFUSED),
        (403, failed("security_exception"), Item.REFUSED),
        (400, failed("index_closed_exception", "closed"), Item.REFUSED),
        (400, failed("validation_exception", "this action would add [2] shards"), Item.REFUSED),
        (400, failed("invalid_index_name_exception"), Item.REFUSED),
        (400, failed("illegal_argument_exception", "no write index is defined for alias [two]. The"), Item.REFUSED),
    ],
)
def test_items(status: int, item: dict[str, Any], verdict: Item) -> None:
    assert judge_item(status, item) is verdict


@pytest.mark.parametrize(
    ("status", "kind", "verdict"),
    [
        (200, "", Whole.READ_ITEMS),
        (429, "es_rejected_execution_exception", Whole.NOT_NOW),
        (502, "", Whole.NOT_NOW),
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
def test_whole_requests(status: int, kind: str, verdict: Whole) -> None:
    assert judge_response(error_response(status, kind, "why")) is verdict


def test_a_conflicts_text_ends_with_the_current_version() -> None:
    text = (
        "[a current version [99] b]: version conflict, current version [12] is higher or equal to the one provided [3]"
    )
    assert current_version(Reason("version_conflict_engine_exception", text)) == 12
    assert current_version(Reason("version_conflict_engine_exception", "something else")) is None


def test_a_reason_tells_its_cause() -> None:
    item = {"error": {"type": "t", "reason": "failed to parse", "caused_by": {"reason": 'For input string: "x"'}}}
    assert item_reason(item).text == 'failed to parse: For input string: "x"'
