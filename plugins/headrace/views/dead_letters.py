"""A stream's dead letters, for the API and the commands: a page of them, and their replay."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.clock import SystemClock, time_text
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.dead_letter_index import (
    DeadLetterIndex,
    DeadLetterReplay,
    KeptLetters,
    LetterFilter,
    ReplayCounts,
    StoredLetter,
)
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.errors import HeadraceError
from headrace.stream import ElasticsearchOutput, Stream
from headrace.stream.model import StreamDefinitionError
from headrace.views.base import View

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_VALUE_CHARACTERS = 500
# A client of Kafka needs a second or two to connect.
_TOPIC_SECONDS = 5.0


class NoSuchOutputError(HeadraceError):
    """The stream has no such Elasticsearch output."""


def elasticsearch_outputs(stream: Stream, output_id: str | None) -> list[ElasticsearchOutput]:
    """The Elasticsearch output with this id, in a list; None: all Elasticsearch outputs.

    Raises:
        NoSuchOutputError: there is no such output, or it is of another kind.
    """
    outputs = [output for output in stream.elasticsearch_outputs if output_id in (None, output.id)]
    if not outputs:
        kinds = ", ".join(f"{output.id} ({output.kind})" for output in stream.outputs)
        wanted = "no Elasticsearch output" if output_id is None else f"no Elasticsearch output {output_id!r}"
        raise NoSuchOutputError(f"Stream {stream.name!r} has {wanted}; its outputs are {kinds}.")
    return outputs


def elasticsearch_output(stream: Stream, output_id: str | None) -> ElasticsearchOutput:
    """The Elasticsearch output with this id; None: the only one.

    Raises:
        NoSuchOutputError: there is no such output, or there are several.
    """
    outputs = elasticsearch_outputs(stream, output_id)
    if len(outputs) > 1:
        raise NoSuchOutputError(
            f"Stream {stream.name!r} has {len(outputs)} Elasticsearch outputs.",
            remedy=f"Name the output: {', '.join(output.id for output in outputs)}.",
        )
    return outputs[0]


def output_of_index(ledger: Ledger, stream: Stream, output: ElasticsearchOutput, index: str) -> ElasticsearchOutput:
    """The output as the stream's replay declared it that writes into this index, the newest definition first.

    A replay may have another dead-letter index and another cluster. If no replay has this index, it is the output with
    another index; where rows have an index each, with the same dead-letter index, which is not named by one of them.
    """
    rows = ledger.results.replay_definitions(stream.name)
    for row in sorted(rows, key=lambda row: (row.created_at_ms, row.revision), reverse=True):
        try:
            replay = Stream.from_json(row.definition)
        except StreamDefinitionError:
            # A definition of another version of headrace.
            continue
        for declared in replay.elasticsearch_outputs:
            if declared.step == output.step and declared.names.may_be(index):
                return declared
    return output.model_copy(update={"index": index}) if output.names.is_plain else output.at(index)


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
    index: str = Field(description="The index that has them; empty if a topic has them.")
    topic: str | None = Field(description="The Kafka topic that has them, if no index has.")
    total: int
    letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a replay would do with the letters: how many it would index, and why it would leave others."""

    replayable: int
    left_because: Mapping[str, int]

    @property
    def left(self) -> int:
        """How many it would leave."""
        return sum(self.left_because.values())


class DeadLettersOf:
    """The dead letters of one output of a stream.

    Its methods raise ElasticsearchUnavailableError after ``max_retry_seconds`` without an answer, and
    ElasticsearchRefusedError, and for letters in a topic the errors of ``TopicLetters``.

    Args:
        environ: where the output's connection is looked up; by default this process's environment.
        timeout_seconds: of a question about letters; by default the output's.
    """

    def __init__(
        self,
        stream_name: str,
        output: ElasticsearchOutput,
        *,
        max_retry_seconds: float,
        timeout_seconds: float | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.output = output
        self._environ = environ
        self._timeout_seconds = timeout_seconds or output.request_timeout_seconds
        self._max_retry_seconds = max_retry_seconds
        # The letters have their batch time. The one in the options is used only for new ids, and none are made here.
        options = IndexingOptions.of(output, Target.of(output, stream_name), batch_time_ms=0)
        self._options = replace(
            options,
            max_retry_seconds=min(options.max_retry_seconds, max_retry_seconds),
            max_throttled_seconds=min(options.max_throttled_seconds, max_retry_seconds),
        )

    def page(self, limit: int) -> DeadLetterPage:
        """Return the newest letters that were not replayed."""
        with self.opened() as kept:
            total = sum(kept.reasons(LetterFilter()).values())
            letters = tuple(map(_letter, kept.find(LetterFilter(), limit)))
        index, topic = self.output.dead_letters, self.output.dead_letter_topic
        return DeadLetterPage(
            output=self.output.id, index=index, topic=topic and topic.topic, total=total, letters=letters
        )

    def plan(self, wanted: LetterFilter, limit: int | None = None) -> ReplayPlan:
        """Return what `replay` would do."""
        with self._replaying() as (letters, replaying):
            reasons = Counter(map(replaying.cannot, letters.find(wanted, limit)))
        replayable = reasons.pop(None, 0)
        return ReplayPlan(replayable, {why: number for why, number in reasons.items() if why is not None})

    def replay(self, wanted: LetterFilter, limit: int | None = None) -> ReplayCounts:
        """Index the documents of the newest letters again; what is in the index stays.

        Raises UnsuitableTargetError: the index is not one concrete index any more.
        """
        with self._replaying() as (letters, replaying):
            return replaying.replay(letters.find(wanted, limit))

    @contextlib.contextmanager
    def opened(self) -> Iterator[KeptLetters]:
        """Open the index or topic of the letters, to find some of them."""
        with (
            self._administration() as administration,
            kept_letters(administration, self._options, self._environ) as kept,
        ):
            yield kept

    def _administration(self) -> Administration:
        return Administration.of(
            self._cluster(), timeout_seconds=self._timeout_seconds, max_retry_seconds=self._max_retry_seconds
        )

    def _cluster(self) -> Cluster:
        return Cluster.of(self.output, self._environ)

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[tuple[KeptLetters, DeadLetterReplay]]:
        transport = ElasticsearchTransport(
            self._cluster(), connections=1, timeout_seconds=self.output.request_timeout_seconds
        )
        with (
            self._administration() as administration,
            contextlib.closing(transport),
            kept_letters(administration, self._options, self._environ) as letters,
        ):
            yield (
                letters,
                DeadLetterReplay(
                    transport,
                    self._options,
                    letters,
                    clock=SystemClock(),
                    concrete_index=administration.concrete_index,
                ),
            )


@contextlib.contextmanager
def kept_letters(
    administration: Administration, options: IndexingOptions, environ: Mapping[str, str] | None
) -> Iterator[KeptLetters]:
    """Open the letters of an output, where its options keep them. ``environ`` has a topic's connection."""
    if options.letter_topic is None:
        yield DeadLetterIndex(administration, options.target)
        return
    # Few outputs have a topic, and others need no client of Kafka.
    from headrace.elasticsearch.dead_letter_topic import TopicLetters

    seconds = max(options.max_retry_seconds, _TOPIC_SECONDS)
    with contextlib.closing(
        TopicLetters(options.letter_topic, options.target, timeout_seconds=seconds, environ=environ)
    ) as letters:
        yield letters


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
