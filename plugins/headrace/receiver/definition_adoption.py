"""Checks whether the receiver job uses the stream's newest definition, as far as receiving is concerned.

A job uses the definition that it started with until it is restarted. Batches have their own definition, so differences
in what only batches use (transforms, outputs, decoders) do not count here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.ledger import EventKind, Ledger
from headrace.ledger.errors import RevisionNotFoundError
from headrace.receiver.key_versions import versioned_by_offsets
from headrace.stream import Stream
from headrace.stream.model import StreamDefinitionError

REVISION = "revision"
"""The attribute of a receiver job that holds the revision of its definition."""

_NOTED = "noted_revision"
"""The attribute that holds the revision for which the difference was reported as an event."""

_FIELDS = ("batch_by", "delivery", "allowed_lateness", "batch_interval", "block_interval", "storage", "spark")
# Batches decode, not receivers.
_NOT_RECEIVED = frozenset({"id", "key_decoder", "value_decoder"})
_LIMITS = (
    "max_block_bytes",
    "max_queued_blocks",
    "prefetch_bytes",
    "max_rate",
    "max_rate_per_partition",
    "backpressure",
    "max_log_bytes",
    "segment_bytes",
    "segment_interval",
)
_ABSENT = "none"


@dataclass(frozen=True, slots=True)
class Unadopted:
    """A receiver job that uses another definition than its stream has, and their differences."""

    stream: str
    epoch: int
    running: int
    newest: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"The receiver job (epoch {self.epoch}) still receives by revision {self.running} of the definition, and "
            f"the stream has revision {self.newest}: {'; '.join(self.differences)}. To have it adopted: "
            f"`headrace streams stop {self.stream}`, then `headrace streams start {self.stream}`."
        )


def unadopted(ledger: Ledger, stream_name: str) -> Unadopted | None:
    """Return what the live receiver job has not adopted of the stream's newest definition; None if nothing, or no job.

    Raises:
        StreamNotFoundError: there is no such stream.
    """
    job = ledger.jobs.current(stream_name)
    if job is None or not job.alive(ledger.now_ms()):
        return None
    row, running = ledger.streams.get(stream_name), job.attributes.get(REVISION)
    if running is None or running == row.revision:
        return None
    try:
        before = Stream.from_json(ledger.streams.at_revision(stream_name, running).definition)
        after = Stream.from_json(row.definition)
    except (RevisionNotFoundError, StreamDefinitionError):
        # The revision is from before the ledger was rebuilt, or of another headrace version, which replaces the job.
        return None
    differences = tuple(receiving_differences(before, after))
    return Unadopted(stream_name, job.epoch, running, row.revision, differences) if differences else None


def record_unadopted(ledger: Ledger, stream_name: str, revision: int) -> None:
    """Append an event if the receiver job has not adopted this revision; once for each job and revision."""
    job = ledger.jobs.current(stream_name)
    if job is None or revision in (job.attributes.get(REVISION), job.attributes.get(_NOTED)):
        return
    found = unadopted(ledger, stream_name)
    if found is None or found.newest != revision:
        return
    ledger.jobs.note(stream_name, found.epoch, {_NOTED: revision})
    payload = {"epoch": found.epoch, "running": found.running, "newest": found.newest}
    ledger.events.append(stream_name, EventKind.DEFINITION_NOT_ADOPTED, {**payload, "differences": found.differences})


def receiving_differences(before: Stream, after: Stream) -> Iterator[str]:
    """Yield each differing field that a receiver job reads, with both values."""
    old, new = _received(before), _received(after)
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            yield f"{name} was {_text(old.get(name))} and is {_text(new.get(name))}"


def _received(stream: Stream) -> dict[str, Any]:
    """Return the fields of a definition that receivers and their job read, by path."""
    fields = stream.model_dump(mode="json")
    found: dict[str, Any] = {}
    for source in fields["inputs"]:
        found |= {f"inputs.{source['id']}.{name}": source[name] for name in source if name not in _NOT_RECEIVED}
    for name in _FIELDS:
        value = fields[name]
        found |= {f"{name}.{part}": value[part] for part in value} if isinstance(value, dict) else {name: value}
    found |= {f"limits.{name}": fields["limits"][name] for name in _LIMITS}
    found["listeners"] = [str(listener) for listener in stream.listeners]
    found["outputs versioned by offsets"] = versioned_by_offsets(stream)
    return found


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return _ABSENT
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
