"""Documents that the server wrote to another place than asked for: what they are, and how they are taken back.

An ingest pipeline can give a document another index or id, and an index template can make a missing index a data
stream. A batch that runs a second time would not find such documents, and would write them again. So the write fails,
and what it has just created elsewhere is deleted: each further try would leave more there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.elasticsearch.errors import IndexingError
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport

_PATH = "/_bulk?timeout=10s&filter_path=items.*.status"
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A document of this id that the server took for ``given_id`` of ``index``, with this ``result``, or that conflicts
    with one there. With neither, it was refused."""

    id: str
    index: str
    given_id: str
    result: str | None
    conflicts: bool


def take_back(transport: Transport, retry_budget: RetryBudget, documents: Sequence[Misplaced]) -> str:
    """Delete the documents that were created. Returns a sentence that says what was deleted, and what is left."""
    created = [document for document in documents if document.result == "created"]
    deleted = set(_deleted(transport, retry_budget, created))
    there = [document for document in documents if document.conflicts or document.result in ("created", "updated")]
    left = [document for document in there if document not in deleted]
    sentences = []
    if deleted:
        sentences.append(f"{len(deleted)} documents that this request created there were deleted again.")
    if left:
        named = ", ".join(f"{document.given_id!r} in {document.index!r}" for document in left[:_EXAMPLES])
        more = ", …" if len(left) > _EXAMPLES else ""
        sentences.append(f"{len(left)} are still there: {named}{more}.")
    return " ".join(sentences)


def _deleted(transport: Transport, retry_budget: RetryBudget, documents: Sequence[Misplaced]) -> list[Misplaced]:
    if not documents:
        return []
    lines = [json.dumps({"delete": {"_index": each.index, "_id": each.given_id}}) for each in documents]
    try:
        response = request_with_retries(
            transport, retry_budget, "POST", _PATH, "".join(f"{line}\n" for line in lines).encode()
        )
    except IndexingError:
        return []
    parsed = response.json()
    items = parsed.get("items") if isinstance(parsed, dict) else None
    if response.status != 200 or not isinstance(items, list) or len(items) != len(documents):
        return []
    return [each for each, item in zip(documents, items, strict=True) if item.get("delete", {}).get("status") == 200]
