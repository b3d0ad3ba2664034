"""Classifies Elasticsearch's answers, for one item of a bulk request and for the whole request.

A bad document and a closed index both give status 400, so the type and the text of the error are compared
(``error_kinds`` has the types). A document is at fault if it does not fit the mapping, is not JSON, or a pipeline
rejects it. What is the index's or the credentials' fails the batch, and what passes is sent again. Status 400 with
another type is in doubt: a pipeline's processor passes on whatever error its code raises. It is a document's where
other documents pass, and fails the batch where none does: a failed batch loses nothing, while a faulty index would make
every document a dead letter. So is status 500 with another type, and an error about the size of the request: both may
be the server's too, so the document is sent alone, several times, before it is compared with others. An error of no
type, and any other status, fail the batch. Measured on 8.19.

New fields beyond ``index.mapping.total_fields.limit`` are the document's fault: the index accepts all documents without
new fields. If most documents have new fields, the output's limit of dead letters fails the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from headrace.elasticsearch.error_kinds import (
    COMPUTATION,
    KIND_OF,
    NO_TYPE,
    OF_PROCESSORS,
    VERSION_CONFLICTS,
    ErrorKind,
    is_size,
)
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
    SUSPECT = auto()
    """The document may be at fault, or the server is ill: send it alone."""
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
    SUSPECT = auto()
    """One document, or the size, may make the whole request fail, or the server is ill."""
    REFUSED = auto()


_INDEX_AT_FAULT_TEXT = re.compile(
    r"^no write index is defined for alias|^pipeline with id \[|^only write ops with an op_type of create are allowed"
    # One full shard; documents of others pass.
    r"|(?i:^number of documents in the (index|shard) can(no|')t exceed)"
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
_SERVER_ERROR = 500
# The server, or a proxy in front of it, says that it cannot answer now.
_NOT_NOW = frozenset({408, 429, 502, 503, 504})
_DELETED_WITHOUT_DOCUMENT = "not_found"
_RESULTS = {
    "created": Item.CREATED,
    "updated": Item.UPDATED,
    "deleted": Item.DELETED,
    _DELETED_WITHOUT_DOCUMENT: Item.DELETED,
    "noop": Item.DROPPED,
}
_OF_KIND = {
    ErrorKind.DOCUMENT: Item.REJECTED,
    ErrorKind.PASSING: Item.NOT_NOW,
    ErrorKind.CREDENTIAL: Item.REFUSED,
    ErrorKind.INDEX: Item.REFUSED,
}
_WHOLE_OF_KIND = {
    ErrorKind.DOCUMENT: Whole.INVALID,
    ErrorKind.PASSING: Whole.NOT_NOW,
    ErrorKind.CREDENTIAL: Whole.REFUSED,
    ErrorKind.INDEX: Whole.REFUSED,
}
_NOT_MOVED: Mapping[str, str] = {}


def judge_item(status: int, item: dict[str, Any], moved: Mapping[str, str] = _NOT_MOVED) -> Item:
    """The verdict on one entry of a bulk answer's ``items`` (the object below the action's name).

    ``moved``: the kinds that the user gives to types of errors.
    """
    result = item.get("result")
    if item.get("error") is not None or (status >= 300 and result != _DELETED_WITHOUT_DOCUMENT):
        return _judge_error(status, item_reason(item), moved)
    return _RESULTS.get(str(result), Item.REFUSED)


def _judge_error(status: int, reason: Reason, moved: Mapping[str, str]) -> Item:
    if status == 409 and reason.type in VERSION_CONFLICTS:
        return Item.CONFLICT
    if given := moved.get(reason.type):
        return _OF_KIND[ErrorKind(given)]
    kind = KIND_OF.get(reason.type)
    if is_size(reason.type, reason.text) or status == 413:
        verdict = Item.SUSPECT
    elif kind is ErrorKind.PASSING or status in _NOT_NOW:
        verdict = Item.NOT_NOW
    elif status in (401, 403) or kind in (ErrorKind.CREDENTIAL, ErrorKind.INDEX):
        verdict = Item.REFUSED
    elif status == _SERVER_ERROR:
        # The server may raise a known type over its own files, too.
        verdict = Item.SUSPECT if kind is None else Item.DOUBTFUL
    elif status != _BAD_REQUEST or reason.type == NO_TYPE or index_at_fault(reason):
        verdict = Item.REFUSED
    else:
        verdict = Item.REJECTED if document_at_fault(reason) else Item.DOUBTFUL
    return verdict


def judge_response(response: Response, moved: Mapping[str, str] = _NOT_MOVED) -> Whole:
    """The verdict on an answer as a whole. ``moved``: the kinds that the user gives to types of errors."""
    status = response.status
    if status == 200:
        return Whole.READ_ITEMS
    if status == 413:
        return Whole.TOO_LARGE
    return _judge_whole(status, Reason(*response.error()), moved)


def _judge_whole(status: int, reason: Reason, moved: Mapping[str, str]) -> Whole:
    if given := moved.get(reason.type):
        return _WHOLE_OF_KIND[ErrorKind(given)]
    kind = KIND_OF.get(reason.type)
    if is_size(reason.type, reason.text):
        return Whole.SUSPECT
    if kind is ErrorKind.PASSING or status in _NOT_NOW or status > _SERVER_ERROR:
        return Whole.NOT_NOW
    if kind in (ErrorKind.CREDENTIAL, ErrorKind.INDEX) or index_at_fault(reason):
        return Whole.REFUSED
    return {_SERVER_ERROR: Whole.SUSPECT, _BAD_REQUEST: Whole.INVALID}.get(status, Whole.REFUSED)


def kind_of_unread(kind: str, moved: Mapping[str, str] = _NOT_MOVED) -> ErrorKind | None:
    """The kind of an error in place of a document that was asked for; None if it is unknown.

    ``moved`` counts only for types that have no kind: a document that the user may not read is never one that cannot
    be read.
    """
    known = KIND_OF.get(kind)
    return known if known is not None or kind not in moved else ErrorKind(moved[kind])


def document_at_fault(reason: Reason) -> bool:
    """Whether an error of status 400 is known to be about one document."""
    if reason.type == "illegal_argument_exception":
        return _DOCUMENT_AT_FAULT_TEXT.match(reason.text) is not None
    return KIND_OF.get(reason.type) is ErrorKind.DOCUMENT and reason.type not in COMPUTATION


def usual_of_processors(reason: Reason) -> bool:
    """Whether processors of pipelines refuse a document with such an error."""
    return reason.type in OF_PROCESSORS


def index_at_fault(reason: Reason) -> bool:
    """Whether an error of status 400 is known to be about the index, so that no part of the request can pass."""
    return (
        KIND_OF.get(reason.type) in (ErrorKind.INDEX, ErrorKind.CREDENTIAL)
        or _INDEX_AT_FAULT_TEXT.search(reason.text) is not None
    )


def item_reason(item: dict[str, Any]) -> Reason:
    """Why an item failed, with the deeper cause that Elasticsearch gives."""
    error = item.get("error")
    if not isinstance(error, dict):
        return Reason(NO_TYPE, encodable(str(error or "the answer gives no reason")))
    text = str(error.get("reason", ""))
    cause = error.get("caused_by")
    deeper = str(cause.get("reason", "")) if isinstance(cause, dict) else ""
    reason = f"{text}: {deeper}" if deeper and deeper not in text else text
    return Reason(str(error.get("type") or NO_TYPE), encodable(reason))


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


def kind_hint(type_: str) -> str:
    """A sentence about the setting that gives this type of error another kind."""
    return (
        f'If errors of this type are about single documents, error_kinds={{"{type_}": "document"}} of the output makes '
        "dead letters of them (docs/outputs.md)."
    )


def refusal(status: int | None, reason: Reason, index: str, document: str = "") -> ElasticsearchRefusedError:
    """The error that fails the batch, with a remedy. ``document`` describes the one that was refused. ``status`` is
    None where the answer has none for this document."""
    if status == 401:
        remedy = "Check the connection's login, API key or token."
    elif status == 403 or KIND_OF.get(reason.type) is ErrorKind.CREDENTIAL:
        remedy = (
            "Grant the connection's user the privileges create_doc, index, read, delete, view_index_metadata and "
            "auto_configure on the index, and also create_index and manage on its dead-letter index (docs/security.md)."
        )
    else:
        remedy = next((remedy for sign, remedy in _REMEDIES if sign.search(str(reason))), "")
        if not remedy:
            remedy = _ANY_REMEDY if reason.type in KIND_OF else f"{_ANY_REMEDY} {kind_hint(reason.type)}"
    shown = str(reason) if status is None else f"{status}, {reason}"
    return ElasticsearchRefusedError(
        f"The search server refuses {document or 'a request'} for index {index!r} with {shown}.",
        remedy=remedy,
    )
