"""Reads what Elasticsearch holds, over its plain HTTP interface."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from examples.demo.errors import DemoError, NotAnsweringError
from examples.demo.proof import DeadLetter, Document, Place

_PAGE = 5_000
_SECONDS = 60.0
_NOT_FOUND = 404
# 503 is also the answer for a new index until its shard has started.
_NOT_NOW = (429, 502, 503, 504)


class ElasticsearchSide:
    """A client of the Elasticsearch at ``url``, without a login."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def create_index(self, index: str, mappings: dict[str, Any]) -> None:
        """Create the index with one shard and no replica, because one node cannot hold a replica."""
        body = {"settings": {"number_of_shards": 1, "number_of_replicas": 0}, "mappings": mappings}
        self._call("PUT", f"/{index}", body)

    def get(self, path: str) -> Any:
        """The decoded JSON of a GET request for this path."""
        return self._call("GET", path)

    def count(self, index: str) -> int:
        """The number of documents that a search sees now; 0 if there is no such index."""
        try:
            return int(self._call("GET", f"/{index}/_count")["count"])
        except _NoSuchIndexError:
            return 0

    def documents(self, index: str) -> Iterator[Document]:
        """Every document of the index."""
        return (Document(hit["_id"], hit["_source"]) for hit in self._all(index))

    def dead_letters(self, index: str) -> Iterator[DeadLetter]:
        """Every dead letter; none if the index is missing, because the first dead letter creates it."""
        try:
            for hit in self._all(index):
                yield _dead_letter(hit["_id"], hit["_source"])
        except _NoSuchIndexError:
            return

    def _all(self, index: str) -> Iterator[dict[str, Any]]:
        self._call("POST", f"/{index}/_refresh")
        fields = "filter_path=_scroll_id,hits.hits._id,hits.hits._source"
        page = self._call("POST", f"/{index}/_search?scroll=2m&{fields}", {"size": _PAGE, "sort": ["_doc"]})
        while hits := page.get("hits", {}).get("hits"):
            yield from hits
            page = self._call("POST", f"/_search/scroll?{fields}", {"scroll": "2m", "scroll_id": page["_scroll_id"]})
        self._call("DELETE", "/_search/scroll", {"scroll_id": page["_scroll_id"]})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the URL is the stack's own
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            reported = error.read(2_000).decode(errors="replace")
            if error.code == _NOT_FOUND:
                raise _NoSuchIndexError(f"Elasticsearch knows no {path}: {reported}.") from None
            if error.code in _NOT_NOW:
                raise NotAnsweringError(f"Elasticsearch answers {error.code} to {method} {path}: {reported}.") from None
            raise DemoError(f"Elasticsearch answers {error.code} to {method} {path}: {reported}.") from None
        except OSError as error:
            raise NotAnsweringError(f"Elasticsearch at {self._url} does not answer: {error}.") from error


class _NoSuchIndexError(DemoError):
    """The answer was 404."""


def _dead_letter(document_id: str, source: dict[str, Any]) -> DeadLetter:
    try:
        place = Place(source["topic"], source["partition"], source["offset"])
    except KeyError:
        place = None
    value = source.get("value")
    return DeadLetter(document_id, place, None if value is None else base64.b64decode(value))
