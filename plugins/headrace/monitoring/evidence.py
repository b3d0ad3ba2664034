"""What the judgement of a stream rests on, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.receiving_tables import PositionRow, ReceiverRow
from headrace.ledger.states import DesiredState
from headrace.ledger.tables import JobRow, StreamRow
from headrace.monitoring.unfinished import Unfinished

# A stream is late beyond the larger of this time and this many batch intervals.
_LATE_SECONDS = 60.0
_LATE_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class DagFacts:
    """A DAG in Airflow.

    ``running`` and ``queued`` are numbers of runs. ``import_error``: why its file cannot be imported; its last good
    version runs until Airflow takes it for stale, after a minute, and starts no more runs.
    """

    dag_id: str
    paused: bool = False
    running: int = 0
    queued: int = 0
    import_error: str | None = None
    stale: bool = False


class State(StrEnum):
    """The states of a stream, the most severe first."""

    FAILING = "failing"
    STALLED = "stalled"
    PAUSED = "paused"
    FALLING_BEHIND = "falling_behind"
    STARTING = "starting"
    STOPPED = "stopped"
    WELL = "well"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a stream. ``since_ms`` None: not known.

    ``details`` is the error of which ``reason`` has the line that matters; None if that is all of it. ``newest_ms`` is
    when its cause was seen last: of failures, the newest one comes first.
    """

    state: State
    reason: str
    remedy: str | None = None
    since_ms: int | None = None
    details: str | None = None
    newest_ms: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a stream is judged by.

    ``recent`` are the newest batches that are not absorbed, newest first; ``dead_letters`` is the number of theirs.
    ``unfinished`` are those that `unfinished_of` finds, ``failed`` the failed ones of ``recent``; ``number_failed``
    counts older ones too. ``failed_positions`` are partitions that an error has stopped. ``job_before`` is the receiver
    job before ``job``. ``write_refusal``: why the ledger cannot be written. ``facts`` is what Airflow says of the two
    DAGs; it lacks a DAG of which nothing is known.
    """

    row: StreamRow
    coalesces: bool
    now_ms: int
    job: JobRow | None
    receivers: Sequence[ReceiverRow]
    recent: Sequence[BatchRow]
    last_completed: BatchRow | None
    unfinished: Sequence[Unfinished] = ()
    failed: Sequence[Unfinished] = ()
    number_failed: int = 0
    job_before: JobRow | None = None
    write_refusal: str | None = None
    dead_letters: int = 0
    failed_positions: Sequence[PositionRow] = ()
    lag_seconds: float | None = None
    batch_dag_id: str = ""
    receiver_dag_id: str = ""
    facts: Mapping[str, DagFacts] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """Whether a person has stopped the stream."""
        return self.row.desired_state is DesiredState.STOPPED

    @property
    def limit_seconds(self) -> float:
        """From this age on, something is late."""
        return max(_LATE_SECONDS, _LATE_INTERVALS * self.row.batch_interval_ms / 1000)

    @property
    def oldest(self) -> Unfinished | None:
        """What is due longest."""
        return min(self.unfinished, key=lambda each: each.due_ms, default=None)

    @property
    def has_paused_receivers(self) -> bool:
        """Whether a live receiver is paused."""
        return any(each.paused_reason and each.alive(self.now_ms) for each in self.receivers)

    def late_seconds(self, since_ms: int) -> float:
        """The seconds from ``since_ms`` until now."""
        return max(0, self.now_ms - since_ms) / 1000
