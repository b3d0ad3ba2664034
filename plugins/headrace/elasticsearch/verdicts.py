"""Classifies Elasticsearch's answers, for one item of a bulk request and for the whole request.

A bad document and a closed index both give status 400, so the type and the text of the error are compared. A document
is at fault if the error is on the list of errors that a document causes: it does not fit the mapping, is not JSON, or a
pipeline rejects it. Errors on the list of the index's fail the batch. All others are in doubt: a pipeline's processor
passes on whatever error its code raises. They are a document's where other documents pass, and fail the batch where
none does: a failed batch loses nothing, while a faulty index would make every document a dead letter. Measured on 8.19.

New fields beyond ``index.mapping.total_fields.limit`` are the document's fault: the index accepts all documents without
new fields. If most documents have new fields, the output's limit of dead letters fails the batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from headrace.elasticsearch.errors import ElasticsearchRefusedError
from headrace.elasticsearch.transport import Response, encodable


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
    DROPPED = auto()
    """An ingest pipeline dropped it."""
    CONFLICT = auto()
    """The id exists, in this version or a newer one."""
    NOT_NOW = auto()
    """Send this item again, later."""
    REJECTED = auto()
    """The document itself is at fault: a dead letter."""
    DOUBTFUL = auto()
    """The document is at fault if others pass, else the index."""
    REFUSED = auto()
    """The index or the credentials are at fault: stop."""


class Whole(Enum):
    """The verdict on a whole request."""

    READ_ITEMS = auto()
    NOT_NOW = auto()
    TOO_LARGE = auto()
    """Send it in smaller parts."""
    INVALID = auto()
    """Some item makes the whole request invalid: find it."""
    REFUSED = auto()


# Errors of status 400 about the index or the cluster. validation_exception: no room for another shard in the cluster.
_INDEX_AT_FAULT = frozenset(
    {
        "index_closed_exception",
        "invalid_index_name_exception",
        "validation_exception",
        "security_exception",
        "index_not_found_exception",
        "invalid_alias_name_exception",
        "routing_missing_exception",
    }
)
_INDEX_AT_FAULT_TEXT = re.compile(
    r"^no write index is defined for alias|^pipeline with id \[|^only write ops with an op_type of create are allowed"
    # One full shard; documents of others pass.
    r"|(?i:^number of documents in the (index|shard) can(no|')t exceed)"
)
# Errors that Java code raises over a value: with status 500, but no later try of the same document helps.
_COMPUTATION = frozenset(
    {
        "arithmetic_exception",
        "array_index_out_of_bounds_exception",
        "array_store_exception",
        "class_cast_exception",
        "concurrent_modification_exception",
        "date_time_exception",
        "date_time_parse_exception",
        "empty_stack_exception",
        "general_script_exception",
        "index_out_of_bounds_exception",
        "negative_array_size_exception",
        "no_such_element_exception",
        "null_pointer_exception",
        "string_index_out_of_bounds_exception",
        "unsupported_operation_exception",
        "unsupported_temporal_type_exception",
    }
)
_OF_PROCESSORS = _COMPUTATION | {"illegal_argument_exception", "number_format_exception", "script_exception"}
# The document does not fit the mapping, is no JSON, or is rejected by a pipeline on purpose.
_DOCUMENT_AT_FAULT = frozenset(
    {
        "document_parsing_exception",
        "mapper_parsing_exception",
        "mapper_exception",
        "strict_dynamic_mapping_exception",
        "parsing_exception",
        "parse_exception",
        "x_content_parse_exception",
        "x_content_e_o_f_exception",
        "json_parse_exception",
        "json_e_o_f_exception",
        "stream_constraints_exception",
        "max_bytes_length_exceeded_exception",
        "action_request_validation_exception",
        "fail_processor_exception",
        "dissect_exception",
    }
)
# illegal_argument_exception can come from any check in Java code. These texts are about a document. They are matched
# from their beginning, because the rest may quote the document.
_DOCUMENT_AT_FAULT_TEXT = re.compile(
    r"mapper \[.*\] cannot be changed from type|can't merge a non|cannot merge a non"
    r"|object mapping \[.*\] can't be changed"
    r"|Document contains at least one immense term"
    r"|Limit of (total fields|mapping depth|field name length|nested fields|nested documents) \["
    r"|The number of nested documents has exceeded"
    r"|[Ff]ield name (cannot |\[)|name cannot be empty|object field (starting|ending) "
    r"|Malformed content, |Flattened field \[|Keys in \[flattened\] fields cannot"
    r"|[Uu]nable to convert \[|[Uu]nable to parse date \["
    r"|field \[.*\] (not present|is null|of type|doesn't exist)"
    r"|cannot (resolve|access|set|add|append) \["
    r"|Provided Grok expressions do not match|Unable to find match for dissect"
    r"|Malformed action/metadata line",
    re.DOTALL,
)
_CURRENT_VERSION = re.compile(r"current version \[(\d+)\]")

_BAD_REQUEST = 400
_DELETED_WITHOUT_DOCUMENT = "not_found"


def judge_item(status: int, item: dict[str, Any]) -> Item:
    """The verdict on one entry of a bulk answer's ``items`` (the object below the action's name)."""
    if item.get("error") is not None:
        return _judge_error(status, item_reason(item))
    result = item.get("result")
    if result in ("deleted", _DELETED_WITHOUT_DOCUMENT):
        return Item.DELETED
    if result == "noop":
        return Item.DROPPED
    return Item.CREATED if result == "created" else Item.UPDATED


def _judge_error(status: int, reason: Reason) -> Item:
    if status == 409:
        return Item.CONFLICT
    if reason.type in _COMPUTATION:
        return Item.DOUBTFUL
    if status == 429 or status >= 500 or reason.type == "cluster_block_exception":
        # A block ends when someone frees disk space or ends the maintenance; max_retry_seconds limits the wait.
        return Item.NOT_NOW
    if status != _BAD_REQUEST or index_at_fault(reason):
        return Item.REFUSED
    return Item.REJECTED if document_at_fault(reason) else Item.DOUBTFUL


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
    if status == _BAD_REQUEST and not index_at_fault(reason):
        return Whole.INVALID
    return Whole.REFUSED


def document_at_fault(reason: Reason) -> bool:
    """Whether an error of status 400 is known to be about one document."""
    if reason.type == "illegal_argument_exception":
        return _DOCUMENT_AT_FAULT_TEXT.match(reason.text) is not None
    return reason.type in _DOCUMENT_AT_FAULT


def usual_of_processors(reason: Reason) -> bool:
    """Whether processors of pipelines refuse a document with such an error."""
    return reason.type in _OF_PROCESSORS


def index_at_fault(reason: Reason) -> bool:
    """Whether an error of status 400 is known to be about the index, so that no part of the request can pass."""
    return reason.type in _INDEX_AT_FAULT or _INDEX_AT_FAULT_TEXT.search(reason.text) is not None


def item_reason(item: dict[str, Any]) -> Reason:
    """Why an item failed, with the deeper cause that Elasticsearch gives."""
    error = item.get("error")
    if not isinstance(error, dict):
        return Reason("unknown", encodable(str(error)))
    text = str(error.get("reason", ""))
    cause = error.get("caused_by")
    deeper = str(cause.get("reason", "")) if isinstance(cause, dict) else ""
    reason = f"{text}: {deeper}" if deeper and deeper not in text else text
    return Reason(str(error.get("type", "unknown")), encodable(reason))


def current_version(reason: Reason) -> int | None:
    """The version that the index holds, from a conflict's text; None if the text does not contain it.

    The text begins with the id, which may contain the same words, so the last match is used.
    """
    versions = _CURRENT_VERSION.findall(reason.text)
    return int(versions[-1]) if versions else None


# Each pattern is searched in the error's "type: text".
_REMEDIES = tuple(
    (re.compile(sign), remedy)
    for sign, remedy in (
        (
            "\\[require_alias\\] request flag",
            "The alias was deleted, or replaced by an index, while the batch was written. Make it an alias of its "
            "index again: headrace creates no index of an alias's name.",
        ),
        ("^index_not_found_exception", "Create the index, or allow it in action.auto_create_index."),
        ("^index_closed_exception", "Open the index."),
        ("^validation_exception", "Make room for the index's shards, or create the index."),
        (
            "(?i)number of documents in the (index|shard) can(no|')t exceed",
            "A shard of the index is full: write to a new index, or to one of more shards (_split).",
        ),
        (
            "^routing_missing_exception",
            "The index's mapping requires a routing, which headrace does not send: take _routing out of the mapping.",
        ),
        ("pipeline with id \\[", "Create the pipeline, or take it out of the index's settings."),
        ("no write index is defined for alias", "Name one index, or make one of the alias's indices its write index."),
        ("only write ops with an op_type of create", "Write to an index; ids are not unique in a data stream."),
    )
)
_ANY_REMEDY = (
    "Correct the index or the connection. Nothing was dropped; the next run of the batch DAG tries the batch again. "
    "Where documents are at fault, let the transform correct or reject them (rejected_because)."
)


def refusal(status: int, reason: Reason, index: str, document: str = "") -> ElasticsearchRefusedError:
    """The error that fails the batch, with a remedy. ``document`` describes the one that was refused."""
    if status == 401:
        remedy = "Check the connection's login, API key or token."
    elif status == 403 or reason.type == "security_exception":
        remedy = (
            "Grant the connection's user the privileges create_doc, index, read, delete, view_index_metadata and "
            "auto_configure on the index, and also create_index and manage on its dead-letter index (docs/security.md)."
        )
    else:
        remedy = next((remedy for sign, remedy in _REMEDIES if sign.search(str(reason))), _ANY_REMEDY)
    return ElasticsearchRefusedError(
        f"The search server refuses {document or 'a request'} for index {index!r} with {status}, {reason}.",
        remedy=remedy,
    )
