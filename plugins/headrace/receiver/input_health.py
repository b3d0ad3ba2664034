"""Records whether Kafka answers queries about each input, since when not, and why.

This distinguishes an empty batch from one whose records are unknown. The tracker notes it per input and topic in its
job's attributes, each receiver per topic in its stats; both are sent with the usual lease renewals. `input_troubles`
combines them for sensors and people.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.ledger.models import JobRow, ReceiverRow

INPUTS = "inputs"
"""The attribute of a receiver job that holds the tracker's view, by input id."""
UNASKED = "unasked"
"""The entry of a receiver's stats that lists the topics that it cannot read or query."""


_NO_ANSWER_YET = "Kafka has not answered yet"
_NO_RECEIVER_YET = "its receivers have not started yet"


class Part(StrEnum):
    """The part of headrace or beside it that an error is about, which decides where to look."""

    JOB = "job"
    RECEIVER = "receiver"
    INPUT = "input"
    """Kafka, or what a custom receiver reads."""


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
    part: Part = Part.INPUT

    def __str__(self) -> str:
        topic = "" if self.topic is None else f"topic {self.topic} of "
        what = "the stream" if self.input_id is None else f"{topic}input {self.input_id}"
        since = "not since the stream began"
        if self.asked_ms:
            since = f"since {time_text(self.asked_ms // 1000 * 1000)}"
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
        return [InputTrouble(None, None, "no receiver has started yet", sealed_ms, starting=True, part=Part.JOB)]
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
        error = "the stream has no receiver job yet"
    elif not job.state.ended:
        # Its error is not named: the job went on after it.
        error = (
            f"no receiver is alive: the lease of the receiver job (epoch {job.epoch}) has run out, which it last "
            f"renewed at {time_text(job.heartbeat_ms)}"
        )
    else:
        error = f"no receiver is alive: the receiver job (epoch {job.epoch}) {job.state.value}"
        error += f": {job.error}" if job.error else ""
    return InputTrouble(None, None, error, sealed_ms, part=Part.JOB)


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
        reports = "; ".join(report for row in rows if (report := _why_not_reading(row, now_ms)))
        sealed_ms = max(row.sealed_through_ms for row in rows)
        reported = f"no receiver reads it ({reports or 'they are starting'})"
        yield InputTrouble(input_id, None, reported, sealed_ms, starting=not reports, part=Part.RECEIVER)


def _why_not_reading(row: ReceiverRow, now_ms: int) -> str | None:
    """The receiver's last error if it has stored nothing since, or since when it is silent; None while it starts."""
    if row.last_error and row.sealed_through_ms <= (row.last_error_at_ms or row.heartbeat_ms):
        return f"{row.receiver_id}: {row.last_error}"
    if not row.state.ended and not row.alive(now_ms):
        return f"{row.receiver_id} has written nothing to the ledger since {time_text(row.heartbeat_ms)}"
    return None


def _of_topics(receivers: list[ReceiverRow], now_ms: int) -> Iterable[InputTrouble]:
    for row in receivers:
        if row.alive(now_ms):
            for entry in row.stats.get(UNASKED) or ():
                yield InputTrouble(row.receiver_id.input_id, entry["topic"], entry["error"], entry["asked_ms"])
