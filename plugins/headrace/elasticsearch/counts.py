"""Counts of rows by outcome. The ledger records the sum over all tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.elasticsearch.errors import DocumentsUnaccountedError

EXAMPLES = 5
"""The largest number of ids that an error or a report names."""


@dataclass(slots=True)
class IndexingCounts:
    """Rows by outcome, with requests, bytes and time. Counts are of rows unless stated otherwise."""

    rows: int = 0
    created: int = 0
    updated: int = 0
    repeated: int = 0
    """The index already had the same document: from an earlier run, or from a request whose answer was lost."""
    kept: int = 0
    """The index already had a document of the same source with other contents: an earlier attempt wrote it with
    another transform, or with one that is not deterministic. It was left unchanged."""
    uncompared: int = 0
    """The index already had a document under the id, which cannot be read, or of which it does not keep what was sent.
    It was left unchanged."""
    foreign: int = 0
    """The index has a document of another source under the id. The write fails."""
    superseded: int = 0
    """Not written, because the index holds a newer version of that id."""
    deleted: int = 0
    """Tombstones that were applied, whether or not there was a document to delete."""
    dead_lettered: int = 0
    letters_withdrawn: int = 0
    """Dead letters of earlier attempts that were deleted because their rows were not rejected again."""
    ignored_tombstones: int = 0
    dropped: int = 0
    """Dropped by an ingest pipeline of Elasticsearch, which answers with success."""
    requests: int = 0
    """Bulk requests sent, including those to the dead-letter index."""
    retries: int = 0
    """Bulk requests that were sent again, in whole or in part."""
    bytes: int = 0
    """Bytes of the bulk bodies sent, before compression."""
    seconds: float = 0.0
    """The task's duration; for several tasks the sum."""
    dead_letter_reasons: Counter[str] = field(default_factory=Counter)
    """Dead-lettered rows by type of reason."""
    dead_letter_example: str = ""
    """One of them as text: its record and its reason. Records without a value are no example."""
    foreign_ids: list[str] = field(default_factory=list)
    """Up to ``EXAMPLES`` ids of the rows counted in ``foreign``."""

    @property
    def indexed(self) -> int:
        """Documents that this run put into the index."""
        return self.created + self.updated

    def add(self, other: IndexingCounts) -> None:
        for each in fields(self):
            if each.name == "dead_letter_reasons":
                self.dead_letter_reasons.update(other.dead_letter_reasons)
            elif each.name == "foreign_ids":
                self.foreign_ids = [*self.foreign_ids, *other.foreign_ids][:EXAMPLES]
            elif each.name == "dead_letter_example":
                self.dead_letter_example = self.dead_letter_example or other.dead_letter_example
            else:
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def check(self) -> None:
        """Raise DocumentsUnaccountedError unless every row has exactly one outcome."""
        outcomes = self.indexed + self.repeated + self.kept + self.uncompared + self.foreign + self.superseded
        outcomes += self.deleted + self.dead_lettered + self.ignored_tombstones + self.dropped
        if outcomes != self.rows:
            raise DocumentsUnaccountedError(
                f"Of {self.rows} rows {outcomes} have an outcome: {self.to_dict()}.",
                remedy="This is a defect of headrace; run the batch again, and report it.",
            )

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON fields, with ``indexed``; without ``foreign``, ``foreign_ids`` and ``dead_letter_example``
        if there are none."""
        counts = {"indexed": self.indexed, **asdict(self), "dead_letter_reasons": dict(self.dead_letter_reasons)}
        if not self.dead_letter_example:
            del counts["dead_letter_example"]
        if not self.foreign:
            del counts["foreign"], counts["foreign_ids"]
        return counts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IndexingCounts:
        names = {each.name for each in fields(cls)} - {"dead_letter_reasons"}
        counts = cls(**{name: values[name] for name in names if name in values})
        counts.dead_letter_reasons.update(values.get("dead_letter_reasons", {}))
        return counts
