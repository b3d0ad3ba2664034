"""A stream's dead letters for the API: a page of them, and their replay, with connections given by the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import Field

from headrace.clock import SystemClock, time_text
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import (
    DeadLetterIndex,
    DeadLetterReplay,
    LetterFilter,
    ReplayCounts,
    StoredLetter,
)
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.errors import HeadraceError
from headrace.stream import Stream
from headrace.views.base import View

# A person waits for the answer.
_RETRY_SECONDS = 5.0
_TIMEOUT_SECONDS = 5.0
_VALUE_CHARACTERS = 500

Environ = Callable[[str], Mapping[str, str] | None]
"""Returns the environment in which a connection id is looked up."""


class NoSuchOutputError(HeadraceError):
    """The stream has no such Elasticsearch output."""


class DeadLetter(View):
    """A record that an output refused."""

    id: str
    at: str | None
    topic: str | None
    partition: int | None
    offset: int | None
    batch_time: str | None
    error_type: str | None
    reason: str | None
    replayed: bool
    value: str | None = Field(description="The beginning of its value as text, if it is text.")


class DeadLetterPage(View):
    """Dead letters of one output, newest first."""

    output: str
    index: str
    total: int
    letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do with the first letters: how many it would index, and why it would leave others."""

    letters: int
    replayable: int
    left_because: Mapping[str, int]


class DeadLettersOf:
    """The dead letters of one output of a stream.

    Its methods raise ElasticsearchUnavailableError after some seconds without an answer, and ElasticsearchRefusedError.
    """

    def __init__(self, stream: Stream, output_id: str | None, environ: Environ) -> None:
        """``output_id`` None: the stream's only Elasticsearch output. Raises NoSuchOutputError."""
        outputs = [output for output in stream.elasticsearch_outputs if output_id in (None, output.id)]
        if len(outputs) != 1:
            names = ", ".join(f"{output.id} ({output.kind})" for output in stream.outputs)
            asked = "one Elasticsearch output" if output_id is None else f"an Elasticsearch output {output_id!r}"
            raise NoSuchOutputError(f"Stream {stream.name!r} does not have {asked}; its outputs are {names}.")
        self.output = outputs[0]
        self._environ = environ
        options = IndexingOptions.of(self.output, stream_name=stream.name, batch_time_ms=0)
        self._options = replace(options, max_retry_seconds=_RETRY_SECONDS)

    def page(self, limit: int) -> DeadLetterPage:
        """Return the newest letters that were not replayed."""
        with self._letters() as kept:
            total = sum(kept.reasons(LetterFilter()).values())
            letters = tuple(map(_letter, kept.find(LetterFilter(), limit)))
        index = self._options.dead_letter_index
        return DeadLetterPage(output=self.output.id, index=index, total=total, letters=letters)

    def plan(self, limit: int) -> ReplayPlan:
        """Return what `replay` would do."""
        with self._replaying() as (kept, replaying):
            replayable, left, number = 0, dict[str, int](), 0
            for letter in kept.find(LetterFilter(), limit):
                number += 1
                why = replaying.cannot(letter)
                if why is None:
                    replayable += 1
                else:
                    left[why] = left.get(why, 0) + 1
            return ReplayPlan(number, replayable, left)

    def replay(self, limit: int) -> ReplayCounts:
        """Index the documents of the newest letters again; what is in the index stays."""
        with self._replaying() as (kept, replaying):
            return replaying.replay(kept.find(LetterFilter(), limit))

    def _cluster(self) -> Cluster:
        connection = self.output.connection
        return Cluster.of(self.output, self._environ(connection) if connection else None)

    @contextlib.contextmanager
    def _letters(self) -> Iterator[DeadLetterIndex]:
        cluster = self._cluster()
        with Administration.of(
            cluster, timeout_seconds=_TIMEOUT_SECONDS, max_retry_seconds=_RETRY_SECONDS
        ) as administration:
            yield DeadLetterIndex(administration, self._options)

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[tuple[DeadLetterIndex, DeadLetterReplay]]:
        transport = ElasticsearchTransport(
            self._cluster(), connections=1, timeout_seconds=self.output.request_timeout_seconds
        )
        with self._letters() as kept, contextlib.closing(transport):
            yield kept, DeadLetterReplay(transport, self._options, kept, clock=SystemClock())


def _letter(letter: StoredLetter) -> DeadLetter:
    fields = letter.fields
    timestamp, batch_time = fields.get("timestamp"), fields.get("batch_time")
    text = fields.get("value_text") or fields.get("document_text")
    return DeadLetter(
        id=letter.id,
        at=None if timestamp is None else time_text(int(timestamp)),
        topic=fields.get("topic"),
        partition=fields.get("partition"),
        offset=fields.get("offset"),
        batch_time=None if batch_time is None else time_text(int(batch_time)),
        error_type=letter.reason.type,
        reason=letter.reason.text,
        replayed=fields.get("replayed_at") is not None,
        value=None if text is None else str(text)[:_VALUE_CHARACTERS],
    )
