"""Writes a task's dead letters to the dead-letter index.

They are written before the batch reports success. A batch whose dead letters cannot be written fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from headrace.elasticsearch.bulk_bodies import TOMBSTONE, PreparedRows
from headrace.elasticsearch.bulk_sender import DOCUMENT_TOO_LARGE, BulkSender
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letters import MAPPINGS, DeadLetter, OriginalRecord, dead_letter
from headrace.elasticsearch.errors import DeadLettersRefusedError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import request_with_retries
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason

# Elasticsearch's reason may quote the document.
_EXAMPLE_CHARACTERS = 500


class OriginalRecords(Protocol):
    """Looks up records by their position in Kafka. Called from one thread, only for dead letters."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record, or None if it is no longer available; the dead letter is then written without it."""
        ...


class DeadLetterWriter:
    """Collects a task's dead letters and writes them, a bounded number at a time."""

    MOST_HELD = 1000
    MOST_BYTES_HELD = 8 * 1024 * 1024
    MOST_REMEMBERED = 50_000
    """Letter ids that are remembered to number letters with equal ids. The rows of one record are at most a few
    requests apart."""

    def __init__(
        self,
        transport: Transport,
        sender: BulkSender,
        options: IndexingOptions,
        originals: OriginalRecords | None,
    ) -> None:
        """``sender`` writes to the dead-letter index."""
        self._transport = transport
        self._sender = sender
        self._options = options
        self._originals = originals
        self._held: list[DeadLetter] = []
        self._ordinals: dict[str, int] = {}
        self._bytes_held = 0
        self._index_ensured = False

    def take(self, batch: pa.RecordBatch, rejected: Iterable[tuple[int, Reason]], counts: IndexingCounts) -> None:
        """Buffer and count the dead letters of these rows; writes them when the buffer is full."""
        for row, reason in rejected:
            letter = self._numbered(dead_letter(batch, row, reason, self._options))
            self._held.append(letter)
            self._bytes_held += letter.size
            counts.dead_lettered += 1
            counts.dead_letter_reasons[reason.type] += 1
            if not counts.dead_letter_example and reason.type != TOMBSTONE:
                counts.dead_letter_example = _example(letter)
            if len(self._held) >= self.MOST_HELD or self._bytes_held >= self.MOST_BYTES_HELD:
                self.flush(counts)

    def _numbered(self, letter: DeadLetter) -> DeadLetter:
        """The letter with an id that no other letter of this task has, so that none overwrites another."""
        ordinal = self._ordinals.pop(letter.id, 0) + 1
        self._ordinals[letter.id] = ordinal
        if len(self._ordinals) > self.MOST_REMEMBERED:
            del self._ordinals[next(iter(self._ordinals))]
        return letter if ordinal == 1 else replace(letter, ordinal=ordinal)

    def flush(self, counts: IndexingCounts) -> None:
        """Write the buffered letters. Raises DeadLettersRefusedError if one of them is refused."""
        if not self._held:
            return
        self._ensure_index()
        letters = [self._with_original(letter) for letter in self._held]
        too_large = self._write(letters, counts)
        # A letter too large for a request is written without its value; the record itself is in the log and in Kafka.
        slim = [replace(letter, omit_value=True) for letter in too_large]
        if slim and self._write(slim, counts):
            raise self._refused(Reason(DOCUMENT_TOO_LARGE, "not even without its value"))
        self._held = []
        self._bytes_held = 0

    def _write(self, letters: Sequence[DeadLetter], counts: IndexingCounts) -> list[DeadLetter]:
        """Write these letters. Returns those that are too large for a request."""
        prepared = _prepared(letters, self._options)
        too_large = []
        for lines in prepared.requests(self._options):
            sent = self._sender.send(prepared, lines)
            counts.requests += sent.counts.requests
            counts.retries += sent.counts.retries
            counts.bytes += sent.counts.bytes
            if sent.counts.dropped:
                raise self._refused(Reason("dropped", "an ingest pipeline of the index drops it"))
            for line, reason in sent.refused:
                if reason.type != DOCUMENT_TOO_LARGE:
                    raise self._refused(reason)
                too_large.append(letters[line])
        return too_large

    def _refused(self, reason: Reason) -> DeadLettersRefusedError:
        return DeadLettersRefusedError(
            f"A dead letter was refused by index {self._options.dead_letter_index!r}: {reason}.",
            remedy="Let headrace create that index, or give it the mapping that it would have created. "
            "The next run of the batch DAG tries the batch again.",
        )

    def _with_original(self, letter: DeadLetter) -> DeadLetter:
        if letter.original is not None or self._originals is None or letter.topic is None:
            return letter
        if letter.partition is None or letter.offset is None:
            return letter
        found = self._originals.fetch(letter.topic, letter.partition, letter.offset, letter.incarnation)
        return letter if found is None else replace(letter, original=found)

    def _ensure_index(self) -> None:
        if self._index_ensured:
            return
        path = f"/{quote(self._options.dead_letter_index, safe='')}"
        retry_budget = self._sender.retry_budget()
        if request_with_retries(self._transport, retry_budget, "HEAD", path).status != 200:
            # The answer is ignored: another task may have created the index, or the user may index but not create.
            # Writing the letters shows whether the index can be used.
            body = json.dumps({"mappings": MAPPINGS}).encode()
            request_with_retries(self._transport, retry_budget, "PUT", path, body)
        self._index_ensured = True


def _prepared(letters: Sequence[DeadLetter], options: IndexingOptions) -> PreparedRows:
    # An existing letter is overwritten: when a batch is run again, the newer reason is the relevant one.
    lines = [
        b'{"index":{"_id":%s}}\n%s\n' % (json.dumps(letter.id).encode(), letter.to_bytes(options)) for letter in letters
    ]
    source = pa.record_batch([pa.array([letter.id for letter in letters], pa.large_string())], names=["id"])
    return PreparedRows(source, np.arange(len(letters)), source.column(0), None, pa.array(lines, pa.large_binary()))


def _example(letter: DeadLetter) -> str:
    record = f"{letter.topic}, partition {letter.partition}, offset {letter.offset}: " if letter.topic else ""
    return f"{record}{letter.reason}"[:_EXAMPLE_CHARACTERS]
