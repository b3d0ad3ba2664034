"""What became of the rows, counted; the sum over tasks is what the ledger records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.elasticsearch.errors import DocumentsUnaccountedError

EXAMPLES = 5
"""As many ids are named."""


@dataclass(slots=True)
class IndexingCounts:
    """Rows by outcome, and what it took. Counts are of rows unless said otherwise."""

    rows: int = 0
    created: int = 0
    updated: int = 0
    repeated: int = 0
    """In the index already, the very same document: an earlier run, or a request whose answer was lost."""
    kept: int = 0
    """In the index already from the same source, with other contents: an earlier attempt with another transform wrote
    it, or one that is not the same twice. It was left as it is."""
    foreign: int = 0
    """In the index is a document of another source. The write fails by it."""
    superseded: int = 0
    """Not written, since the index holds a newer version of that id."""
    deleted: int = 0
    """Tombstones that took effect, whether or not there was a document to delete."""
    dead_lettered: int = 0
    letters_withdrawn: int = 0
    """Dead letters of earlier attempts that were deleted, since their rows were not rejected again."""
    ignored_tombstones: int = 0
    requests: int = 0
    """Bulk requests sent, those to the dead-letter index included."""
    retries: int = 0
    """Bulk requests that were sent again, in whole or in part."""
    bytes: int = 0
    """Bytes of the bulk bodies sent, before compression."""
    seconds: float = 0.0
    """The task's time; over several tasks their sum."""
    dead_letter_reasons: Counter[str] = field(default_factory=Counter)
    """Dead-lettered rows by type of reason."""
    foreign_ids: list[str] = field(default_factory=list)
    """Some of the ids behind ``foreign``."""

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
            else:
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def check(self) -> None:
        """Raise DocumentsUnaccountedError unless every row has exactly one outcome."""
        outcomes = self.indexed + self.repeated + self.kept + self.foreign + self.superseded + self.deleted
        outcomes += self.dead_lettered + self.ignored_tombstones
        if outcomes != self.rows:
            raise DocumentsUnaccountedError(
                f"Of {self.rows} rows {outcomes} have an outcome: {self.to_dict()}.",
                remedy="This is a defect of headrace; run the batch again, and report it.",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, ``indexed`` included. Foreign documents are named where there are any."""
        counts = {"indexed": self.indexed, **asdict(self), "dead_letter_reasons": dict(self.dead_letter_reasons)}
        if not self.foreign:
            del counts["foreign"], counts["foreign_ids"]
        return counts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IndexingCounts:
        names = {each.name for each in fields(cls)} - {"dead_letter_reasons"}
        counts = cls(**{name: values[name] for name in names if name in values})
        counts.dead_letter_reasons.update(values.get("dead_letter_reasons", {}))
        return counts
