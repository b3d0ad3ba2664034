"""What is wrong with a stream that runs: inputs that Kafka does not answer for, an outdated definition, slow runs.

Whether Kafka answers queries about each input distinguishes an empty batch from one whose records are unknown. The
tracker notes it per input and topic in its job's attributes, each receiver per topic in its stats; both are sent with
the usual lease renewals. `input_problems` combines them for sensors and people.

A job uses the definition that it started with until it is restarted. Batches have their own definition, so differences
in what only batches use (transforms, outputs, decoders) do not count here.

Commands import this module for what it says, so it imports no client of Kafka.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.ledger import BatchState, EventKind, Ledger
from headrace.ledger.errors import RevisionNotFoundError

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import BatchRow
    from headrace.ledger.receiving.tables import ReceiverRow
    from headrace.ledger.tables import JobRow
    from headrace.stream import Stream


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
class OutdatedDefinition:
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


def outdated_definition(ledger: Ledger, stream_name: str) -> OutdatedDefinition | None:
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
    # Its import takes a sixth of the time of `headrace streams list`, and definitions rarely differ.
    from headrace.stream import Stream
    from headrace.stream.model import StreamDefinitionError

    try:
        before = Stream.from_json(ledger.streams.at_revision(stream_name, running).definition)
        after = Stream.from_json(row.definition)
    except (RevisionNotFoundError, StreamDefinitionError):
        # The revision is from before the ledger was rebuilt, or of another headrace version, which replaces the job.
        return None
    differences = tuple(receiving_differences(before, after))
    return OutdatedDefinition(stream_name, job.epoch, running, row.revision, differences) if differences else None


def record_outdated_definition(ledger: Ledger, stream_name: str, revision: int) -> None:
    """Append an event if the receiver job has not adopted this revision; once for each job and revision."""
    job = ledger.jobs.current(stream_name)
    if job is None or revision in (job.attributes.get(REVISION), job.attributes.get(_NOTED)):
        return
    outdated = outdated_definition(ledger, stream_name)
    if outdated is None or outdated.newest != revision:
        return
    ledger.jobs.note(stream_name, outdated.epoch, {_NOTED: revision})
    payload = {"epoch": outdated.epoch, "running": outdated.running, "newest": outdated.newest}
    ledger.events.append(
        stream_name, EventKind.DEFINITION_NOT_ADOPTED, {**payload, "differences": outdated.differences}
    )


def receiving_differences(before: Stream, after: Stream) -> Iterator[str]:
    """Yield each differing field that a receiver job reads, with both values."""
    old, new = _received(before), _received(after)
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            yield f"{name} was {_text(old.get(name))} and is {_text(new.get(name))}"


def _received(stream: Stream) -> dict[str, Any]:
    """Return the fields of a definition that receivers and their job read, by path, without folders of files."""
    fields = stream.without_folders.model_dump(mode="json")
    values: dict[str, Any] = {}
    for source in fields["inputs"]:
        values |= {f"inputs.{source['id']}.{name}": source[name] for name in source if name not in _NOT_RECEIVED}
    for name in _FIELDS:
        value = fields[name]
        values |= {f"{name}.{part}": value[part] for part in value} if isinstance(value, dict) else {name: value}
    values |= {f"limits.{name}": fields["limits"][name] for name in _LIMITS}
    values["listeners"] = [str(listener) for listener in stream.listeners]
    values["outputs versioned by offsets"] = stream.versioned_by_offsets
    return values


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return _ABSENT
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


INPUTS = "inputs"
"""The attribute of a receiver job that holds the tracker's view, by input id."""
UNREADABLE_TOPICS = "unasked"
"""The entry of a receiver's stats that lists the topics that it cannot read or query."""
OPEN_TRANSACTIONS = "open_transactions"
"""The entry of a receiver's stats that lists the partitions whose records wait for a transaction to end."""


_NO_ANSWER_YET = "Kafka has not answered yet"
_NO_RECEIVER_YET = "its receivers have not started yet"


class Part(StrEnum):
    """The part of headrace or beside it that an error is about, which decides where to look."""

    JOB = "job"
    RECEIVER = "receiver"
    INPUT = "input"
    """Kafka, or what a custom receiver reads."""


@dataclass(frozen=True, slots=True)
class InputProblem:
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


def input_problems(job: JobRow | None, receivers: Iterable[ReceiverRow], now_ms: int) -> list[InputProblem]:
    """Return the parts of the stream that are not received at the moment, the worst first.

    Paused receivers are not included: they report it themselves, and their records stay in Kafka.
    """
    rows = list(receivers)
    if job is None or not job.alive(now_ms):
        return [_no_job(job, rows)]
    mine = [row for row in rows if row.job_epoch == job.epoch]
    if not mine:
        sealed_ms = max((row.sealed_through_ms for row in rows), default=0)
        return [InputProblem(None, None, "no receiver has started yet", sealed_ms, starting=True, part=Part.JOB)]
    problems = [*_of_inputs(job), *_of_receivers(mine, now_ms), *_of_topics(mine, now_ms)]
    worst: dict[tuple[str | None, str | None], InputProblem] = {}
    for problem in problems:
        key = (problem.input_id, problem.topic)
        # A problem of the whole input explains those of its topics.
        if key not in worst and (problem.input_id, None) not in worst:
            worst[key] = problem
    return list(worst.values())


def receiver_state(receiver: ReceiverRow, problems: Collection[InputProblem]) -> str:
    """Return the state of a live receiver, for people: one that runs but cannot query Kafka is not "running"."""
    mine = [problem for problem in problems if problem.input_id == receiver.receiver_id.input_id]
    # If only some of its topics are missing, it reads the others.
    if any(problem.topic is None for problem in mine) or (mine and not receiver.stats.get("partitions")):
        return "waiting for its input" if receiver.state.value == "running" else receiver.state.value
    return receiver.state.value


def _no_job(job: JobRow | None, receivers: list[ReceiverRow]) -> InputProblem:
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
    return InputProblem(None, None, error, sealed_ms, part=Part.JOB)


def _of_inputs(job: JobRow) -> Iterable[InputProblem]:
    for input_id, known in (job.attributes.get(INPUTS) or {}).items():
        if known["error"] is not None:
            starting = known["error"] in (_NO_ANSWER_YET, _NO_RECEIVER_YET)
            yield InputProblem(input_id, None, known["error"], known["asked_ms"], starting=starting)
        for topic, problem in known["topics"].items():
            yield InputProblem(input_id, topic, problem["error"], problem["asked_ms"])


def _of_receivers(receivers: list[ReceiverRow], now_ms: int) -> Iterable[InputProblem]:
    """Yield the inputs that no receiver reads. A receiver that is still starting does not read."""
    for input_id in sorted({row.receiver_id.input_id for row in receivers}):
        rows = [row for row in receivers if row.receiver_id.input_id == input_id]
        if any(row.alive(now_ms) and row.state.value != "starting" for row in rows):
            continue
        reports = "; ".join(report for row in rows if (report := _why_not_reading(row, now_ms)))
        sealed_ms = max(row.sealed_through_ms for row in rows)
        reported = f"no receiver reads it ({reports or 'they are starting'})"
        yield InputProblem(input_id, None, reported, sealed_ms, starting=not reports, part=Part.RECEIVER)


def _why_not_reading(row: ReceiverRow, now_ms: int) -> str | None:
    """The receiver's last error if it has stored nothing since, or since when it is silent; None while it starts."""
    if row.last_error and row.sealed_through_ms <= (row.last_error_at_ms or row.heartbeat_ms):
        return f"{row.receiver_id}: {row.last_error}"
    if not row.state.ended and not row.alive(now_ms):
        return f"{row.receiver_id} has written nothing to the ledger since {time_text(row.heartbeat_ms)}"
    return None


def _of_topics(receivers: list[ReceiverRow], now_ms: int) -> Iterable[InputProblem]:
    for row in receivers:
        if row.alive(now_ms):
            for entry in row.stats.get(UNREADABLE_TOPICS) or ():
                yield InputProblem(row.receiver_id.input_id, entry["topic"], entry["error"], entry["asked_ms"])


def open_transactions(receivers: Iterable[ReceiverRow], now_ms: int) -> list[dict[str, Any]]:
    """The partitions, as live receivers report them, whose records wait for a transaction to end; the longest first.
    Each has ``topic``, ``partition``, the ``offset`` of the transaction, ``since_ms`` and the offsets ``behind`` it."""
    found = [entry for row in receivers if row.alive(now_ms) for entry in row.stats.get(OPEN_TRANSACTIONS) or ()]
    return sorted(found, key=lambda entry: int(entry["since_ms"]))


@dataclass(frozen=True, slots=True)
class Numbers:
    """What live receivers report, together. ``lag`` leaves out ``lag_unknown`` partitions; ``input_rate`` is in records
    per second. None: not known."""

    input_rate: float
    lag: int | None
    lag_unknown: int
    lag_seconds: float | None
    queue_bytes: int
    paused: bool


def numbers(receivers: Collection[ReceiverRow], now_ms: int) -> Numbers:
    """The sums over the live receivers."""
    live = [receiver for receiver in receivers if receiver.alive(now_ms)]
    stats = [receiver.stats for receiver in live if "total_lag" in receiver.stats]
    seconds = [reported.get("lag_seconds") for reported in stats]
    known = [behind for behind in seconds if behind is not None]
    lags = [reported["total_lag"] for reported in stats if reported["total_lag"] is not None]
    return Numbers(
        input_rate=round(sum(reported.get("rate", 0.0) for reported in stats), 1),
        lag=sum(lags) if lags else None,
        lag_unknown=sum(reported.get("lag_unknown", 0) for reported in stats),
        lag_seconds=max(known) if known and len(known) == len(seconds) else None,
        queue_bytes=sum(reported.get("queued_bytes", 0) for reported in stats),
        paused=any(receiver.paused_reason for receiver in live),
    )


# A local disk syncs in milliseconds, and an object store takes about a second.
SLOW_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SlowPart:
    """A part that takes long when a receiver stores blocks: ``seconds`` is the mean of its last few calls."""

    receiver: ReceiverId
    name: str
    seconds: float

    def __str__(self) -> str:
        what = "a sync of the log" if self.name == LOG_WRITE else "a transaction of the ledger"
        return f"{what} takes {self.seconds:.1f} s in receiver {self.receiver}"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if self.name == LOG_WRITE:
            return "Look at the disk, or the object store, of the stream's storage. More receivers there are as slow."
        return (
            "Look at the disk and the load of the ledger's database, and at what holds locks in it. More receivers "
            "make it slower."
        )


LOG_WRITE, LEDGER_TRANSACTION = "log_write", "ledger_transaction"
"""The parts of storing a block. ``<name>_seconds`` in a receiver's stats is the mean of its last few calls."""


def slow_parts(receivers: Iterable[ReceiverRow]) -> list[SlowPart]:
    """Return each part that is slow, in the receiver in which it is slowest."""
    slow = [
        SlowPart(row.receiver_id, name, seconds)
        for row in receivers
        for name in (LOG_WRITE, LEDGER_TRANSACTION)
        if (seconds := row.stats.get(f"{name}_seconds") or 0.0) >= SLOW_SECONDS
    ]
    worst: dict[str, SlowPart] = {}
    for part in sorted(slow, key=lambda part: -part.seconds):
        worst.setdefault(part.name, part)
    return list(worst.values())


CLOCK_AHEAD = "clock_ahead_seconds"
"""In a receiver's stats: by how much its host's clock is ahead of the ledger's; negative if it is behind."""
# From this difference on, a clock is or was wrong, not just not quite that of the ledger.
_CLOCKS_DIFFER_SECONDS = 60.0


def differing_clock(receivers: Iterable[ReceiverRow]) -> tuple[ReceiverRow, float] | None:
    """Return the receiver whose host's clock differs most from the ledger's, and by how much; None if none does."""
    differing = [
        (row, float(ahead))
        for row in receivers
        if abs(ahead := row.stats.get(CLOCK_AHEAD) or 0.0) >= _CLOCKS_DIFFER_SECONDS
    ]
    return max(differing, key=lambda found: abs(found[1]), default=None)


# Runs are too slow if this many batches in a row began late: a single late start is caught up.
_SLOW_BATCHES = 5
_ALLOCATED = [state for state in BatchState if state is not BatchState.ABSORBED]


@dataclass(frozen=True, slots=True)
class SlowRuns:
    """Each of the last batches began after another batch time had ended. Milliseconds.

    ``run_ms`` is the mean time between the allocations of consecutive batches. ``late_ms`` is the time from the newest
    batch's first batch time to its allocation.
    """

    run_ms: int
    interval_ms: int
    late_ms: int

    def text(self, *, coalesces: bool) -> str:
        """Return what is slow, and what to do about it, for a stream that coalesces or does not."""
        grows = "batches take over several batch times" if coalesces else "the delay grows with each"
        return (
            f"runs take {self.run_ms / 1000:.1f} s and the batch interval is {self.interval_ms / 1000:g} s, so {grows} "
            f"(the last one began {self.late_ms / 1000:.1f} s after its first batch time). Give the stream a longer "
            "batch_interval, or its batch DAG single_task=True"
        )


def slow_runs(ledger: Ledger, stream_name: str) -> SlowRuns | None:
    """Figures of a stream whose runs take longer than its interval, or None if they do not."""
    newest = ledger.batches.page(stream_name, _SLOW_BATCHES, _ALLOCATED)
    if len(newest) < _SLOW_BATCHES:
        return None
    return slow_runs_of(newest, ledger.streams.get(stream_name).batch_interval_ms)


def slow_runs_of(newest: Sequence[BatchRow], interval_ms: int) -> SlowRuns | None:
    """The same from the newest batches that are not absorbed, newest first."""
    if len(newest) < _SLOW_BATCHES:
        return None
    newest = newest[:_SLOW_BATCHES]
    late_ms = [row.allocated_at_ms - row.first_time_ms for row in newest]
    run_ms = (newest[0].allocated_at_ms - newest[-1].allocated_at_ms) // (_SLOW_BATCHES - 1)
    if run_ms <= interval_ms or min(late_ms) <= interval_ms:
        return None
    return SlowRuns(run_ms, interval_ms, late_ms[0])
