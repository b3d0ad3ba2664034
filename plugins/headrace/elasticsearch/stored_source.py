"""The documents of one index as its mapping keeps them, compared with what was sent.

A mapping may leave fields out of ``_source``, or all of it, or make it anew from the fields' values.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, refusal

_MAPPING = (
    "*.mappings._source,*.settings.index.mode,*.settings.index.mapping.source.mode,*.settings.index.derived_source,"
    "*.settings.index.provided_name"
)
UNPARSED = "unparsed"
"""Instead of ``_source`` in an answer that cannot be parsed: the answer's bytes from the document on."""
# Their default is synthetic: Elasticsearch makes the document again from the fields' values, as OpenSearch does with
# derived_source.
_SYNTHETIC_MODES = ("logsdb", "time_series")


class StoredSource:
    """The documents of one index, as its mapping keeps them. The mapping is asked for when it matters, once."""

    def __init__(self, transport: Transport, index: str) -> None:
        self._transport = transport
        self._index = index
        self._kept: _KeptFields | None = None

    def same(self, document: bytes, there: dict[str, Any], retry_budget: RetryBudget) -> bool | None:
        """Whether the index's document is this one. None if it cannot be known by what the index keeps of it.

        ``there`` is Elasticsearch's answer about the document. Values are compared as JSON: neither 1.0 nor true is 1.
        Raises the errors of ``request_with_retries``, and ElasticsearchRefusedError.
        """
        if UNPARSED in there:
            # Elasticsearch keeps a document's bytes as they were sent, unless it leaves out fields.
            return True if there[UNPARSED].startswith(document) else None
        if "_source" not in there:
            return None
        try:
            sent, held = json.loads(document), there["_source"]
            if _text(sent) == _text(held):
                return True
            if self._kept is None:
                self._kept = self._ask(retry_budget)
            return self._kept.same(sent, held)
        except (ValueError, RecursionError):
            return None

    def _ask(self, retry_budget: RetryBudget) -> _KeptFields:
        path = f"/{quote(self._index, safe='')}?filter_path={_MAPPING}"
        response = request_with_retries(self._transport, retry_budget, "GET", path)
        parsed = response.json()
        if response.status != 200 or not isinstance(parsed, dict) or not parsed:
            raise refusal(response.status, Reason(*response.error()), self._index)
        (described,) = list(parsed.values())[:1]
        return _KeptFields.of(described)


@dataclass(frozen=True, slots=True)
class _KeptFields:
    """The fields that ``_source`` keeps."""

    comparable: bool
    included: re.Pattern[str] | None
    excluded: re.Pattern[str] | None

    @classmethod
    def of(cls, described: dict[str, Any]) -> _KeptFields:
        """``described``: Elasticsearch's description of the index."""
        source = described.get("mappings", {}).get("_source", {})
        settings = described.get("settings", {}).get("index", {})
        mode = settings.get("mapping", {}).get("source", {}).get("mode") or source.get("mode")
        derived = str(settings.get("derived_source", {}).get("enabled")).lower() == "true"
        if mode is None and (settings.get("mode") in _SYNTHETIC_MODES or derived):
            mode = "synthetic"
        return cls(mode in (None, "stored"), _paths(source.get("includes")), _paths(source.get("excludes")))

    def same(self, sent: Any, held: Any) -> bool | None:
        """Whether the fields that are kept are equal, of documents that differ as a whole."""
        if not self.comparable:
            return None
        if self.included is None and self.excluded is None:
            return False
        return sorted(filter(self._keeps, _leaves(sent))) == sorted(_leaves(held))

    def _keeps(self, leaf: tuple[str, str]) -> bool:
        path, _ = leaf
        return (self.included is None or self.included.fullmatch(path) is not None) and (
            self.excluded is None or self.excluded.fullmatch(path) is None
        )


def _paths(patterns: str | Sequence[str] | None) -> re.Pattern[str] | None:
    """What matches the paths of these fields and of all fields below them; ``*`` stands for any characters."""
    if not patterns:
        return None
    # fnmatch's expressions do not go back over many stars, as plain ones do.
    plain = (
        "*".join(map(glob.escape, one.split("*"))) for one in ([patterns] if isinstance(patterns, str) else patterns)
    )
    return re.compile("|".join(fnmatch.translate(f"{one}{below}") for one in plain for below in ("", ".*")))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, value as JSON) of all values but objects and arrays: a left-out field may leave an empty one behind."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, path)
    else:
        # Elasticsearch writes a number beyond a double's range as this text, when it writes a document again.
        beyond = isinstance(value, float) and math.isinf(value)
        yield path, _text(f"{value:g}".replace("inf", "Infinity") if beyond else value)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
