"""Counts of rows by outcome, and the report of a write, which carries them. The ledger records the sum over all tasks.

The logs of Spark's Python workers are not part of a batch's log. So they store their warnings as small files meanwhile,
beside the URI in the options; `headrace.spark.outputs.writer` reads them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from headrace.elasticsearch.errors import DocumentsUnaccountedError, ForeignDocumentsError
from headrace.elasticsearch.target import Target
from headrace.wal.storage import open_storage

EXAMPLES = 5
"""The largest number of ids that an error or a report names."""


class HeldVersion(NamedTuple):
    """A version that the index holds, which is newer than a row's, and its document."""

    version: int
    id: str


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
    ignored_events: int = 0
    """Change events that change no row, and truncates that are ignored."""
    truncates: int = 0
    """Truncates of the table that were applied."""
    truncated_below: int = 0
    """The highest version of these: documents of older ones are deleted. The ledger does not get it."""
    truncated: int = 0
    """Documents that truncates have deleted. They are no rows."""
    by_index: Counter[str] = field(default_factory=Counter)
    """Documents that this run put into each index, where every row has an index of its own."""
    dropped: int = 0
    """Dropped by an ingest pipeline of Elasticsearch, which answers with success."""
    requests: int = 0
    """Bulk requests sent, including those to the dead-letter index."""
    retries: int = 0
    """Bulk requests that were sent again, in whole or in part, after an error or without an answer. Not those that were
    throttled."""
    throttled_requests: int = 0
    """Bulk requests of which the server refused the whole or a part with 429, and which were sent again."""
    slow_requests: int = 0
    """Bulk requests that took so long that the next ones were smaller."""
    throttled_seconds: float = 0.0
    """How long the task had a request that waited because the server had answered 429; for several tasks the sum."""
    ceiling_seconds: float = 0.0
    """How long it had one that waited because of the output's ceiling; for several tasks the sum."""
    bytes: int = 0
    """Bytes of the bulk bodies sent, before compression."""
    seconds: float = 0.0
    """The task's duration; for several tasks the sum."""
    dead_letter_reasons: Counter[str] = field(default_factory=Counter)
    """Dead-lettered rows by type of reason."""
    dead_letter_example: str = ""
    """One of them as text: its record and its reason. Records without a value are no example."""
    letters_index: str = ""
    """The index behind the name of the dead-letter index, if letters were written and the name is an alias."""
    foreign_ids: list[str] = field(default_factory=list)
    """Up to ``EXAMPLES`` ids of the rows counted in ``foreign``."""
    held: dict[str, HeldVersion] = field(default_factory=dict)
    """The highest version that superseded rows met, by their ``topic-partition`` if it is an offset, or under "" if it
    is a batch time. The ledger does not get them."""

    @property
    def indexed(self) -> int:
        """Documents that this run put into the index."""
        return self.created + self.updated

    def add(self, other: IndexingCounts) -> None:
        for count in fields(self):
            if count.name in ("dead_letter_reasons", "by_index"):
                getattr(self, count.name).update(getattr(other, count.name))
            elif count.name == "foreign_ids":
                self.foreign_ids = [*self.foreign_ids, *other.foreign_ids][:EXAMPLES]
            elif count.name == "held":
                for place, version in other.held.items():
                    self.meets(place, version)
            elif count.name == "truncated_below":
                self.truncated_below = max(self.truncated_below, other.truncated_below)
            elif count.name in ("dead_letter_example", "letters_index"):
                setattr(self, count.name, getattr(self, count.name) or getattr(other, count.name))
            else:
                setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))

    def meets(self, place: str, held: HeldVersion) -> None:
        """Keep the highest version of each place."""
        if place not in self.held or held.version > self.held[place].version:
            self.held[place] = held

    def check(self) -> None:
        """Raise DocumentsUnaccountedError unless every row has exactly one outcome."""
        outcomes = self.indexed + self.repeated + self.kept + self.uncompared + self.foreign + self.superseded
        outcomes += self.deleted + self.dead_lettered + self.ignored_tombstones + self.dropped
        outcomes += self.ignored_events + self.truncates
        if outcomes != self.rows:
            raise DocumentsUnaccountedError(
                f"Of {self.rows} rows {outcomes} have an outcome: {self.to_dict()}.",
                remedy="This is a defect of headrace; run the batch again, and report it.",
            )

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON fields, with ``indexed``; without ``foreign``, ``foreign_ids``, ``held``,
        ``letters_index``, ``dead_letter_example``, ``by_index``, those of change events, and those of throttling if
        there are none."""
        counts = {"indexed": self.indexed, **asdict(self), "dead_letter_reasons": dict(self.dead_letter_reasons)}
        counts["by_index"] = dict(self.by_index)
        if not self.dead_letter_example:
            del counts["dead_letter_example"]
        if not self.foreign:
            del counts["foreign"], counts["foreign_ids"]
        if not self.held:
            del counts["held"]
        if not self.letters_index:
            del counts["letters_index"]
        for name in _OFTEN_NONE:
            if not counts[name]:
                del counts[name]
        return counts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IndexingCounts:
        names = {count.name for count in fields(cls)} - {"dead_letter_reasons", "by_index", "held"}
        counts = cls(**{name: values[name] for name in names if name in values})
        counts.dead_letter_reasons.update(values.get("dead_letter_reasons", {}))
        counts.by_index.update(values.get("by_index", {}))
        counts.held = {place: HeldVersion(*held) for place, held in values.get("held", {}).items()}
        return counts


_OFTEN_NONE = (
    *("by_index", "ignored_events", "truncates", "truncated_below", "truncated"),
    *("throttled_requests", "slow_requests", "throttled_seconds", "ceiling_seconds"),
)

WARNING_SUFFIX = ".warning-"
"""A warning file's name is the report's name, this, the process id, the handler's id and a number."""
# The least time between two stored warnings: several requests of a task wait at the same time for the same reason.
_EVERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class IndexingReport:
    """The result of one write."""

    target: Target
    """Its ``concrete`` is what the name stood for after the write; None if there is no index."""
    counts: IndexingCounts
    duplicates: int = 0
    """Rows of the batch with the same id as another row."""
    targets: tuple[Target, ...] = ()
    """Those of the batch's names, where every row has an index of its own. Then ``target`` has their text."""

    def check_foreign(self) -> None:
        """Raise ForeignDocumentsError if the index holds documents of another source under ids of the batch."""
        counts = self.counts
        if counts.foreign:
            examples = ", ".join(map(repr, counts.foreign_ids))
            raise ForeignDocumentsError(
                f"Index {self.target.name!r} holds other documents under {counts.foreign} ids of the batch "
                f"({examples}), which no attempt at this batch wrote. They were left as they are, and the batch's "
                "documents of these ids are not in the index.",
                remedy="Find out what wrote them: another stream or program, a stream of this name with an earlier "
                'ledger, or a topic of the same name. Index into an index of its own, or set write_method="index" to '
                "replace them.",
            )


class _BesideReport(logging.Handler):
    def __init__(self, report: str) -> None:
        super().__init__(logging.WARNING)
        self._folder, _, self._name = report.rpartition("/")
        self._written = 0
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        self._written += 1
        # A write must not fail because a warning cannot be stored.
        with contextlib.suppress(Exception):
            name = f"{self._name}{WARNING_SUFFIX}{os.getpid()}-{id(self)}-{self._written}"
            open_storage(self._folder).write_atomically(name, record.getMessage().encode())


@contextlib.contextmanager
def warnings_beside(report: str) -> Iterator[None]:
    """Store the warnings of ``headrace.elasticsearch`` beside the report at this URI during the ``with`` block."""
    handler = _BesideReport(report)
    log = logging.getLogger("headrace.elasticsearch")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def take_warnings(report: str) -> list[str]:
    """Read and delete the warnings beside the report at this URI."""
    folder, _, name = report.rpartition("/")
    storage = open_storage(folder)
    warnings = []
    for path in storage.paths():
        if path.startswith(name + WARNING_SUFFIX):
            warnings.append(storage.read(path).decode())
            storage.delete(path)
    return warnings
