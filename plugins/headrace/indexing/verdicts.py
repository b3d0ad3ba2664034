"""What Elasticsearch's answers mean, for one item of a bulk request and for the request as a whole.

Measured on 8.19; the status alone does not tell a bad document (400) from a closed index (also 400).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from headrace.indexing.errors import ElasticsearchRefusedError
from headrace.indexing.transport import Response


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a document was not indexed: ``type`` is short and countable, ``text`` is for people."""

    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.type}: {self.text}"


class Item(Enum):
    """The verdict on one item."""

    CREATED = auto()
    UPDATED = auto()
    DELETED = auto()
    CONFLICT = auto()
    """The id is there, in this version or a newer one."""
    NOT_NOW = auto()
    """Send this item again, later."""
    REJECTED = auto()
    """It can never be indexed: a dead letter."""
    REFUSED = auto()
    """The index, not the document, is at fault, and no repetition cures it: stop."""


class Whole(Enum):
    """The verdict on a whole request."""

    READ_ITEMS = auto()
    NOT_NOW = auto()
    TOO_LARGE = auto()
    """Send it in smaller parts."""
    INVALID = auto()
    """Some item makes the whole request invalid: find it."""
    REFUSED = auto()


# 400s that speak of the index or the cluster. validation_exception: the cluster has no room for another shard.
_INDEX_AT_FAULT = frozenset(
    {
        "index_closed_exception",
        "invalid_index_name_exception",
        "validation_exception",
        "security_exception",
        "index_not_found_exception",
        "invalid_alias_name_exception",
    }
)
_INDEX_AT_FAULT_TEXT = re.compile(
    r"^no write index is defined for alias|^pipeline with id \[|^only write ops with an op_type of create are allowed"
)
_CURRENT_VERSION = re.compile(r"current version \[(\d+)\]")

_NOT_FOUND = 404
_DELETED_WITHOUT_DOCUMENT = "not_found"


def judge_item(status: int, item: dict[str, Any]) -> Item:
    """The verdict on one entry of a bulk answer's ``items`` (the object below the action's name)."""
    error = item.get("error")
    if error is None:
        result = item.get("result")
        if result in ("deleted", _DELETED_WITHOUT_DOCUMENT):
            return Item.DELETED
        return Item.CREATED if result == "created" else Item.UPDATED
    reason = item_reason(item)
    if status == 409:
        return Item.CONFLICT
    if status == 429 or status >= 500 or reason.type == "cluster_block_exception":
        # A block is lifted when someone makes room or ends the maintenance; the bound on retries says when to stop.
        return Item.NOT_NOW
    if status in (401, 403, _NOT_FOUND) or index_at_fault(reason):
        return Item.REFUSED
    return Item.REJECTED


def judge_response(response: Response) -> Whole:
    """The verdict on an answer as a whole."""
    status = response.status
    if status == 200:
        return Whole.READ_ITEMS
    if status in (408, 429) or status >= 500:
        return Whole.NOT_NOW
    if status == 413:
        return Whole.TOO_LARGE
    reason = Reason(*response.error())
    if reason.type == "cluster_block_exception":
        return Whole.NOT_NOW
    if status == 400 and not index_at_fault(reason):
        return Whole.INVALID
    return Whole.REFUSED


def index_at_fault(reason: Reason) -> bool:
    """Whether an error of status 400 is about the index rather than about one document."""
    return reason.type in _INDEX_AT_FAULT or _INDEX_AT_FAULT_TEXT.search(reason.text) is not None


def item_reason(item: dict[str, Any]) -> Reason:
    """Why an item failed, with the deeper cause that Elasticsearch gives."""
    error = item.get("error")
    if not isinstance(error, dict):
        return Reason("unknown", str(error))
    text = str(error.get("reason", ""))
    cause = error.get("caused_by")
    deeper = str(cause.get("reason", "")) if isinstance(cause, dict) else ""
    return Reason(str(error.get("type", "unknown")), f"{text}: {deeper}" if deeper and deeper not in text else text)


def current_version(reason: Reason) -> int | None:
    """The version that the index holds, out of a conflict's text; None if the text does not say.

    The text begins with the id, which can be anything: the last mention is Elasticsearch's.
    """
    found = _CURRENT_VERSION.findall(reason.text)
    return int(found[-1]) if found else None


def refusal(status: int, reason: Reason, index: str) -> ElasticsearchRefusedError:
    """The error that stops the batch, with what to do about it."""
    if status == 401:
        remedy = "Check the connection's login, API key or token."
    elif status == 403 or reason.type == "security_exception":
        remedy = "Grant the connection's user the privileges create_doc, index, delete and auto_configure on the index."
    elif reason.type == "index_not_found_exception":
        remedy = "Create the index, or allow it in action.auto_create_index."
    elif reason.type == "index_closed_exception":
        remedy = "Open the index."
    elif reason.type == "validation_exception":
        remedy = "Make room for the index's shards, or create the index."
    else:
        remedy = "Correct the index or the connection, then run the batch again; nothing was dropped."
    return ElasticsearchRefusedError(
        f"Elasticsearch refuses to index into {index!r} with {status}, {reason}.", remedy=remedy
    )
