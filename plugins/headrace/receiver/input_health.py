"""Records whether Kafka answers queries about each input, since when not, and why.

This distinguishes an empty batch from one whose records are unknown. The tracker notes it per input and topic in its
job's attributes, each receiver per topic in its stats; both are sent with the usual lease renewals. `input_troubles`
combines them for sensors and people.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ledger.models import JobRow, ReceiverRow

INPUTS = "inputs"
"""The attribute of a receiver job that holds the tracker's view, by input id."""
UNASKED = "unasked"
"""The entry of a receiver's stats that lists the topics that it cannot read or query."""


_NO_ANSWER_YET = "Kafka has not answered yet"
_NO_RECEIVER_YET = "its receivers have not started yet"


@dataclass(frozen=True, slots=True)
class InputTrouble:
    """A part of a stream that is not received. ``input_id`` None: the whole stream; ``topic`` None: the whole input.

    ``asked_ms`` is the last time of the ledger's clock at which it was known to be received, 0 if never.
    ``starting``: no error is known; it has only not started yet.
    """

    input_id: str | None
    topic: str | None
    error: str
    asked_ms: int
    starting: bool = False

    def __str__(self) -> str:
        topic = "" if self.topic is None else f"topic {self.topic} of "
        what = "the stream" if self.input_id is None else f"{topic}input {self.input_id}"
        since = "not since the stream began"
        if self.asked_ms:
            at = datetime.fromtimestamp(self.asked_ms / 1000, UTC)
            since = f"since {at.isoformat(timespec='seconds').replace('+00:00', 'Z')}"
        return f"{what} is not received: {self.error.rstrip('.')} ({since})"


class InputHealth:
    """The tracker's view of its inputs."""

    def __init__(self, input_ids: Iterable[str], *, custom: Collection[str] = ()) -> None:
        """``custom`` are the inputs of custom receivers, about which Kafka is not queried."""
        self._inputs: dict[str, dict[str, Any]] = {
            input_id: {"asked_ms": 0, "error": _NO_RECEIVER_YET if input_id in custom else _NO_ANSWER_YET, "topics": {}}
            for input_id in input_ids
        }

    def inherit(self, attributes: Mapping[str, Any]) -> None:
        """Take the times of Kafka's last answers from the attributes of the previous job."""
        for input_id, known in (attributes.get(INPUTS) or {}).items():
            mine = self._inputs.get(input_id)
            if mine is not None:
                mine["asked_ms"] = max(mine["asked_ms"], known.get("asked_ms", 0))
                mine["topics"] = known.get("topics", {})

    def answered(self, input_id: str, now_ms: int, topics: Mapping[str, str]) -> None:
        """Note that Kafka answered. ``topics`` maps each named topic without information to the reason."""
        known = self._inputs[input_id]
        before = known["topics"]
        # A topic that was missing from the beginning has the time 0; one that vanished, that of the last answer before.
        last_ms = known["asked_ms"]
        known["topics"] = {
            topic: {"asked_ms": before[topic]["asked_ms"] if topic in before else last_ms, "error": error}
            for topic, error in topics.items()
        }
        known["asked_ms"], known["error"] = now_ms, None

    def failed(self, input_id: str, error: str) -> None:
        """Note that Kafka did not answer."""
        self._inputs[input_id]["error"] = error

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the value of the job's attribute."""
        return {input_id: dict(known) for input_id, known in self._inputs.items()}


def input_troubles(job: JobRow | None, receivers: Iterable[ReceiverRow], now_ms: int) -> list[InputTrouble]:
    """Return the parts of the stream that are not received at the moment, the worst first.

    Paused receivers are not included: they report it themselves, and their records stay in Kafka.
    """
    rows = list(receivers)
    if job is None or not job.alive(now_ms):
        return [_no_job(job, rows)]
    mine = [row for row in rows if row.job_epoch == job.epoch]
    if not mine:
        sealed_ms = max((row.sealed_through_ms for row in rows), default=0)
        return [InputTrouble(None, None, "no receiver has started yet", sealed_ms, starting=True)]
    troubles = [*_of_inputs(job), *_of_receivers(mine, now_ms), *_of_topics(mine, now_ms)]
    found: dict[tuple[str | None, str | None], InputTrouble] = {}
    for trouble in troubles:
        key = (trouble.input_id, trouble.topic)
        # A trouble of the whole input explains the troubles of its topics.
        if key not in found and (trouble.input_id, None) not in found:
            found[key] = trouble
    return list(found.values())


def receiver_state(receiver: ReceiverRow, troubles: Collection[InputTrouble]) -> str:
    """Return the state of a live receiver, for people: one that runs but cannot query Kafka is not "running"."""
    mine = [each for each in troubles if each.input_id == receiver.receiver_id.input_id]
    # If only some of its topics are missing, it reads the others.
    if any(each.topic is None for each in mine) or (mine and not receiver.stats.get("partitions")):
        return "waiting for its input" if receiver.state.value == "running" else receiver.state.value
    return receiver.state.value


def _no_job(job: JobRow | None, receivers: list[ReceiverRow]) -> InputTrouble:
    sealed_ms = max((row.sealed_through_ms for row in receivers), default=0)
    if job is None:
        return InputTrouble(None, None, "the stream has no receiver job yet", sealed_ms)
    if not job.state.ended:
        error = f"no receiver is alive: the lease of the receiver job (epoch {job.epoch}) has run out"
    else:
        error = f"no receiver is alive: the receiver job (epoch {job.epoch}) {job.state.value}"
    return InputTrouble(None, None, error + (f": {job.error}" if job.error else ""), sealed_ms)


def _of_inputs(job: JobRow) -> Iterable[InputTrouble]:
    for input_id, known in (job.attributes.get(INPUTS) or {}).items():
        if known["error"] is not None:
            starting = known["error"] in (_NO_ANSWER_YET, _NO_RECEIVER_YET)
            yield InputTrouble(input_id, None, known["error"], known["asked_ms"], starting=starting)
        for topic, trouble in known["topics"].items():
            yield InputTrouble(input_id, topic, trouble["error"], trouble["asked_ms"])


def _of_receivers(receivers: list[ReceiverRow], now_ms: int) -> Iterable[InputTrouble]:
    """Yield the inputs that no receiver reads. A receiver that is still starting does not read."""
    for input_id in sorted({row.receiver_id.input_id for row in receivers}):
        rows = [row for row in receivers if row.receiver_id.input_id == input_id]
        if any(row.alive(now_ms) and row.state.value != "starting" for row in rows):
            continue
        errors = "; ".join(f"{row.receiver_id}: {row.last_error}" for row in rows if row.last_error)
        sealed_ms = max(row.sealed_through_ms for row in rows)
        reported = f"no receiver reads it ({errors or 'they are starting'})"
        yield InputTrouble(input_id, None, reported, sealed_ms, starting=not errors)


def _of_topics(receivers: list[ReceiverRow], now_ms: int) -> Iterable[InputTrouble]:
    for row in receivers:
        if row.alive(now_ms):
            for entry in row.stats.get(UNASKED) or ():
                yield InputTrouble(row.receiver_id.input_id, entry["topic"], entry["error"], entry["asked_ms"])
