"""Judges a stream: what is wrong, why, since when, and what to do. The most severe finding is the stream's state."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.clock import readable_seconds, time_text
from headrace.errors import FAILURE, Failure, headline
from headrace.ledger.batches.tables import AttemptRow, BatchRow
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.overviews import StreamOverview
from headrace.ledger.states import BatchState, DesiredState
from headrace.ledger.tables import JobRow
from headrace.receiver.health import (
    InputProblem,
    Part,
    SlowPart,
    differing_clock,
    input_problems,
    open_transactions,
    slow_parts,
    slow_runs_of,
)
from headrace.views.batches import Unfinished

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

    @property
    def gone(self) -> bool:
        """Whether it is in no file any more, so that unpausing it has no effect."""
        return self.stale and not self.import_error


class State(StrEnum):
    """What a stream is, judged by what is known; the first that applies, in this order."""

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
    """What a stream is judged by: what the ledger has of it, and what was derived from that or asked elsewhere.

    ``unfinished`` are the batches that `unfinished_of` finds, ``failed`` the failed ones of the overview's ``recent``.
    ``write_refusal``: why the ledger cannot be written. ``facts`` is what Airflow says of the two DAGs; it lacks a DAG
    of which nothing is known. ``tried_again`` returns when the repair tries a batch again, as the end of a sentence;
    None if that is not known.
    """

    overview: StreamOverview
    unfinished: Sequence[Unfinished] = ()
    failed: Sequence[Unfinished] = ()
    write_refusal: LedgerUnavailableError | None = None
    lag_seconds: float | None = None
    batch_dag_id: str = ""
    receiver_dag_id: str = ""
    facts: Mapping[str, DagFacts] = field(default_factory=dict)
    tried_again: Callable[[BatchRow], str | None] = lambda _: None

    @property
    def stopped(self) -> bool:
        """Whether a person has stopped the stream."""
        return self.overview.stream.desired_state is DesiredState.STOPPED

    @property
    def coalesces(self) -> bool:
        """Whether runs take over the batch times that have no run. Few findings read the definition."""
        from headrace.stream import Stream
        from headrace.stream.model import StreamDefinitionError

        definition = self.overview.stream.definition
        try:
            return Stream.from_json(definition).coalesces
        except StreamDefinitionError:
            # A definition of another version of headrace.
            return bool(json.loads(definition).get("coalesce"))

    @property
    def limit_seconds(self) -> float:
        """From this age on, something is late."""
        return max(_LATE_SECONDS, _LATE_INTERVALS * self.overview.stream.batch_interval_ms / 1000)

    @property
    def oldest(self) -> Unfinished | None:
        """What is due longest."""
        return min(self.unfinished, key=lambda unfinished: unfinished.due_ms, default=None)

    @property
    def slow_parts(self) -> list[SlowPart]:
        """What is slow where the job's receivers store their blocks, by their last heartbeats."""
        job = self.overview.job
        return [] if job is None else slow_parts(row for row in self.overview.receivers if row.job_epoch == job.epoch)

    @property
    def has_paused_receivers(self) -> bool:
        """Whether a live receiver is paused."""
        return any(
            receiver.paused_reason and receiver.alive(self.overview.now_ms) for receiver in self.overview.receivers
        )

    def late_seconds(self, since_ms: int) -> float:
        """The seconds from ``since_ms`` until now."""
        return max(0, self.overview.now_ms - since_ms) / 1000


# Starting a receiver job takes Spark half a minute, on a busy machine a few.
_STARTING_MS = 300_000
_AGAIN = (
    "Its outputs keep what they wrote, no other batch waits for it, and the repair does not try it again. Correct the "
    "cause that the error names, and run it again."
)
_NO_RECEIVER = "Look at the receiver job's log, and whether Spark gets the executors that the receivers need."


def judge(evidence: Evidence) -> list[Finding]:
    """Return all findings, the most severe first, of failures the newest cause first. There is always one.

    An error counts as long as nothing good came after it: it is the stream's state only until then.
    """
    order = list(State)
    findings = [
        *_unwritable(evidence),
        *_failing(evidence),
        *_delayed(evidence),
        *_stalled_batches(evidence),
        *_sealed_ahead(evidence),
        *_receiving(evidence),
        *_behind(evidence),
        *_paused(evidence),
        *_stopped(evidence),
        *_clocks(evidence),
        *_dead_letters(evidence),
    ]
    findings.sort(key=lambda finding: (order.index(finding.state), -finding.newest_ms))
    return findings or [_well(evidence)]


# -- failing -----------------------------------------------------------------------------------------------------------


def _unwritable(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    if evidence.write_refusal is not None:
        # No heartbeat could be written either, so what is older than this is not known to be true any more.
        yield Finding(
            State.FAILING,
            f"The ledger cannot be written: {evidence.write_refusal.what}",
            f"{evidence.write_refusal.remedy} Receivers and batches then go on by themselves.",
            None if overview.job is None else overview.job.heartbeat_ms,
            newest_ms=overview.now_ms,
        )


def _failing(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    groups: dict[str, list[Unfinished]] = {}
    listed = {batch.batch_time_ms for batch in evidence.unfinished}
    others = [batch for batch in evidence.failed if batch.batch_time_ms not in listed]
    for unfinished in [*evidence.unfinished, *others]:
        if (error := _error(unfinished)) is not None:
            groups.setdefault(_cause(evidence, unfinished, error), []).append(unfinished)
    for group in groups.values():
        # Of the failed batches between the oldest and the newest ones only the number is known.
        more = max(overview.failed - sum(map(len, groups.values())), 0) if len(groups) == 1 else 0
        yield _failing_batches(evidence, sorted(group, key=lambda unfinished: unfinished.batch_time_ms), more)
    for position in overview.failed_positions:
        partition = f"{position.partition.topic}-{position.partition.partition}"
        yield Finding(
            State.FAILING,
            f"Partition {partition} is stopped since {time_text(position.updated_at_ms)}: {position.error}",
            "Correct the cause that the error names; the receiver then has to be started again (stop and start the "
            "stream). Other partitions go on.",
            position.updated_at_ms,
            newest_ms=position.updated_at_ms,
        )


def _cause(evidence: Evidence, unfinished: Unfinished, error: str) -> str:
    """What batches that failed for the same reason have in common: the error without numbers and ids, and its kind."""
    job = _died_with(evidence, unfinished)
    if job is not None:
        return f"job {job.epoch}"
    passed = _passed(evidence, unfinished)
    return f"{unfinished.completed_before} {passed} {re.sub(r'[0-9]+', '0', headline(error)[0])}"


def _error(unfinished: Unfinished) -> str | None:
    """The error of a batch that has failed, also while it is run again; None if it has not failed."""
    batch, failed = unfinished.batch, unfinished.failed
    return None if batch is None else batch.error or (failed[-1].error if failed else None)


def _failed_ms(unfinished: Unfinished) -> int:
    """When it failed last."""
    allocated_ms = 0 if unfinished.batch is None else unfinished.batch.allocated_at_ms
    times = [attempt.ended_at_ms or attempt.started_at_ms for attempt in unfinished.failed]
    return max(times, default=max(allocated_ms, unfinished.due_ms))


def _died_with(evidence: Evidence, unfinished: Unfinished) -> JobRow | None:
    """The receiver job whose application ran the batch's last attempt, if the attempt failed since the job ended."""
    overview = evidence.overview
    if not unfinished.failed:
        return None
    attempt, job = unfinished.failed[-1], overview.job
    if attempt.way != "connect" or attempt.attributes.get(FAILURE, Failure.PASSING) != Failure.PASSING or job is None:
        return None
    before = attempt.started_at_ms < job.acquired_at_ms
    died = overview.job_before if before else job
    if died is None or (died is job and job.alive(overview.now_ms)):
        return None
    return died if (attempt.ended_at_ms or overview.now_ms) >= died.heartbeat_ms else None


def _passed(evidence: Evidence, unfinished: Unfinished) -> bool:
    """Whether batches have completed since it failed, so that the repair will most likely complete it too.

    After an error of the user's code that takes another definition or other code: its records may be the only ones
    that fail.
    """
    overview = evidence.overview
    last, failed = overview.last_completed, unfinished.failed
    if unfinished.completed_before or last is None or (last.completed_at_ms or 0) <= _failed_ms(unfinished):
        return False
    kind = failed[-1].attributes.get(FAILURE) if failed else None
    if kind not in (Failure.CODE, Failure.FINAL):
        return True
    before = [
        batch for batch in overview.recent if batch.completed_at_ms and batch.completed_at_ms < _failed_ms(unfinished)
    ]
    return (failed[-1].revision or last.revision) < last.revision or (
        bool(before) and before[0].code_version != last.code_version
    )


def _failing_batches(evidence: Evidence, group: Sequence[Unfinished], more: int) -> Finding:
    """One finding for batches that failed for the same reason, ``more`` of which were not read."""
    first, newest = group[0], max(group, key=_failed_ms)
    ends_ms = [attempt.ended_at_ms or attempt.started_at_ms for attempt in first.failed]
    since_ms = min(ends_ms, default=_failed_ms(first))
    batch = f"Batch {time_text(first.batch_time_ms)}"
    others = len(group) - 1 + more
    batches = f"{batch} and {others:,} more" if others else batch
    error, details = headline(_error(newest) or "")
    job = _died_with(evidence, first)
    if job is not None:
        died = headline(job.error)[0] if job.error else f"it last renewed its lease at {time_text(job.heartbeat_ms)}"
        return Finding(
            State.FALLING_BEHIND,
            f"{batches} failed with the receiver job (epoch {job.epoch}), in which it ran: {died}",
            "Nothing: it is run again as soon as the next receiver job runs.",
            since_ms,
            details or error,
            _failed_ms(newest),
        )
    if _passed(evidence, first):
        when = None if others or first.batch is None else evidence.tried_again(first.batch)
        again = "them again" if others else "it again" if when is None else f"it again {when}"
        return Finding(
            State.FALLING_BEHIND,
            f"{batches} failed, last at {time_text(_failed_ms(newest))}. Later batches have completed since, so the "
            f"repair runs {again}. The error was: {error}",
            None,
            since_ms,
            details,
            _failed_ms(newest),
        )
    times = f"{len(first.failed)} times" if len(first.failed) > 1 else ""
    tries = "" if not times else f" (the first one {times})" if others else f", {times}"
    running = first.batch is not None and first.batch.state is BatchState.RUNNING
    doing = "is being run again; before, it failed" if running and not others else "failed"
    known = " had completed before. Begun again, it" if first.completed_before else ""
    return Finding(
        State.FAILING,
        f"{batches}{known} {doing}{tries}, first at {time_text(since_ms)}: {error}",
        _AGAIN if first.completed_before else _remedy_of(evidence, first, newest.failed),
        since_ms,
        details,
        _failed_ms(newest),
    )


def _remedy_of(evidence: Evidence, first: Unfinished, failed: Sequence[AttemptRow]) -> str:
    """What to do about batches of which ``first`` is the first, by the attempts of the one that ``failed`` last."""
    kind = failed[-1].attributes.get(FAILURE) if failed else None
    if kind == Failure.CODE.value:
        return (
            "Correct the transform, the definition or the index's mapping. The repair tries the batch again when "
            "the code or the definition has changed; otherwise run the batch again."
        )
    if kind == Failure.FINAL.value:
        return "Stored data is missing or damaged: `headrace streams fsck` names it. Repair it, or abandon the batch."
    when = None if first.batch is None else evidence.tried_again(first.batch)
    again = "the batch again by itself" if when is None else f"batch {time_text(first.batch_time_ms)} again {when}"
    return (
        f"Correct the cause that the error names. The repair tries {again}, or run it again. If it can never succeed, "
        "abandon it."
    )


def _delayed(evidence: Evidence) -> Iterator[Finding]:
    for unfinished in evidence.unfinished:
        if unfinished.warning is not None and not unfinished.failed:
            yield Finding(
                State.STALLED if is_standing_still(evidence) else State.FALLING_BEHIND,
                f"Batch {time_text(unfinished.batch_time_ms)} is delayed: {unfinished.warning.rstrip('.')}.",
                "Correct the cause that this names. The batch tries again by itself, and fails if it has no success.",
                unfinished.due_ms,
            )


# -- stalled -----------------------------------------------------------------------------------------------------------


def _stalled_batches(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    dag = evidence.facts.get(evidence.batch_dag_id)
    since_ms = _last_activity(evidence)
    oldest = evidence.oldest
    if dag is not None and dag.paused and not dag.gone:
        if not evidence.stopped or oldest is not None:
            waiting = [batch.batch_time_ms for batch in evidence.unfinished if not batch.completed_before]
            left = f"; records wait since batch time {time_text(min(waiting))}" if waiting else ""
            yield Finding(
                State.STALLED,
                f"The DAG {dag.dag_id} is paused in Airflow, so no batch is run{left}.",
                f"Unpause {dag.dag_id}. Its next run takes over the batch times that were missed."
                if evidence.coalesces
                else f"Unpause {dag.dag_id}.",
                since_ms,
            )
        return
    if dag is not None and dag.import_error:
        yield Finding(
            State.STALLED,
            f"Airflow cannot import the file of the DAG {dag.dag_id}, and starts no more runs: {dag.import_error}",
            "Correct the file. Airflow's list of DAGs shows the whole import error.",
            since_ms,
        )
    elif dag is not None and dag.stale and (not evidence.stopped or oldest is not None):
        yield Finding(
            State.STALLED,
            f"Airflow finds the DAG {dag.dag_id} in no file any more, and starts no more runs.",
            _restore(dag),
            since_ms,
        )
    if oldest is not None and is_standing_still(evidence):
        completed_ms = None if overview.last_completed is None else overview.last_completed.completed_at_ms
        yield _nothing_completes(evidence, dag, oldest, completed_ms)


def _sealed_ahead(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    ahead_ms = overview.stream.sealed_until_ms - overview.now_ms
    if ahead_ms / 1000 > evidence.limit_seconds:
        yield Finding(
            State.STALLED,
            f"Batch {time_text(overview.stream.sealed_until_ms)} was allocated while the ledger's clock was ahead: "
            f"records wait for the batch after it, for {readable_seconds(ahead_ms / 1000)}.",
            f"Check that the clock of the ledger's database is right now. Then `headrace streams reopen "
            f"{overview.stream.name} --yes` has them processed at once; the batches that are there stay. Nothing is "
            "lost, and without it the stream continues by itself then.",
        )


def is_standing_still(evidence: Evidence) -> bool:
    """Whether a batch is late, and none has completed for as long."""
    overview = evidence.overview
    oldest = evidence.oldest
    if oldest is None or evidence.late_seconds(oldest.due_ms) <= evidence.limit_seconds:
        return False
    completed_ms = None if overview.last_completed is None else overview.last_completed.completed_at_ms
    return completed_ms is None or evidence.late_seconds(completed_ms) > evidence.limit_seconds


def _nothing_completes(
    evidence: Evidence, dag: DagFacts | None, oldest: Unfinished, completed_ms: int | None
) -> Finding:
    completed = (
        "No batch has completed yet"
        if completed_ms is None
        else f"No batch has completed since {time_text(completed_ms)}"
    )
    late = readable_seconds(evidence.late_seconds(oldest.due_ms))
    reason = f"{completed}; batch {time_text(oldest.batch_time_ms)} is {oldest.state} for {late}."
    if dag is None:
        remedy = _look_at("batch DAG", evidence.batch_dag_id)
    elif dag.running:
        remedy = f"A run of {dag.dag_id} is running: its newest task's log says what it waits for."
    elif dag.queued:
        remedy = f"Runs of {dag.dag_id} are queued, and none runs: look whether Airflow's scheduler has free slots."
    else:
        remedy = f"No run of {dag.dag_id} is running: look at its last run, and whether Airflow's scheduler is alive."
    return Finding(State.STALLED, reason, remedy, completed_ms or oldest.due_ms)


def _look_at(what: str, dag_id: str) -> str:
    """What to do if nothing is known of a DAG; its id is then the default one."""
    return (
        f"Look at the stream's {what} in Airflow ({dag_id}, unless it has another id): is it unpaused, and does it run?"
    )


def _restore(dag: DagFacts) -> str:
    return f"Restore the file of the DAG {dag.dag_id}, which Airflow does not find any more."


def _last_activity(evidence: Evidence) -> int | None:
    overview = evidence.overview
    return overview.recent[0].allocated_at_ms if overview.recent else None


# -- receiving ---------------------------------------------------------------------------------------------------------


def _receiving(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    if evidence.stopped:
        return
    dag = evidence.facts.get(evidence.receiver_dag_id)
    problems = input_problems(overview.job, overview.receivers, overview.now_ms)
    alive = overview.job is not None and overview.job.alive(overview.now_ms)
    for problem in problems:
        if (problem.starting and not _overdue(evidence, problem)) or _just_begun(evidence, problem, dag):
            since_ms = overview.stream.created_at_ms if overview.job is None else overview.job.acquired_at_ms
            yield Finding(State.STARTING, f"The receiver job starts: {problem.error}.", None, since_ms)
        else:
            remedy = _NO_RECEIVER if _overdue(evidence, problem) else _restart(evidence, dag, problem, alive=alive)
            yield Finding(State.STALLED, _not_received(problem), remedy, problem.asked_ms or None)
    if alive and dag is not None and (dag.paused or dag.gone):
        what = "in no file any more" if dag.gone else "paused"
        yield Finding(
            State.WELL,
            f"The DAG {dag.dag_id} is {what}: if the receiver job ends, no other is started.",
            _restore(dag) if dag.gone else f"Unpause {dag.dag_id}.",
        )
    if alive and overview.job is not None:
        for text in overview.job.attributes.get("troubles") or ():
            yield Finding(State.WELL, str(text))


def _just_begun(evidence: Evidence, problem: InputProblem, dag: DagFacts | None) -> bool:
    """Whether there is no receiver job yet because the stream, or a run of its receiver DAG, has only just begun."""
    overview = evidence.overview
    if overview.job is not None or problem.input_id is not None or (dag is not None and dag.paused):
        return False
    return evidence.late_seconds(overview.stream.created_at_ms) * 1000 < _STARTING_MS


def _is_custom(evidence: Evidence, input_id: str | None) -> bool:
    """Whether the input, or every input if it is None, has receivers of the user's."""
    inputs = json.loads(evidence.overview.stream.definition).get("inputs") or []
    kinds = [source.get("kind") for source in inputs if input_id in (None, source.get("id"))]
    return bool(kinds) and all(kind == "receiver" for kind in kinds)


def _overdue(evidence: Evidence, problem: InputProblem) -> bool:
    """Whether the receiver job had more than enough time to start its first receiver."""
    overview = evidence.overview
    if overview.job is None or not problem.starting or problem.input_id is not None:
        return False
    return overview.now_ms - overview.job.acquired_at_ms > _STARTING_MS


def _not_received(problem: InputProblem) -> str:
    text = str(problem)
    return text[0].upper() + text[1:] + "."


def _restart(evidence: Evidence, dag: DagFacts | None, problem: InputProblem, *, alive: bool) -> str:
    custom = _is_custom(evidence, problem.input_id)
    if alive and (custom or problem.part is Part.RECEIVER):
        after_change = "; stop and start the stream after a change of their code" if custom else ""
        slow = "".join(f"By its last heartbeat, {part}. {part.remedy} " for part in evidence.slow_parts)
        return (
            f"{slow}The receivers' last errors say why, with their stacks in "
            f"`headrace events list {evidence.overview.stream.name} --kind receiver_error`. "
            "One that writes nothing has lost its executor, hangs, or cannot reach the ledger. "
            f"They are started again until it is over{after_change}."
        )
    if alive:
        return (
            "Look whether Kafka runs and the connection's address, credentials and topic are right. Receiving "
            "continues by itself."
        )
    if dag is None:
        look = _look_at("receiver DAG", evidence.receiver_dag_id)
        return f"A run of the receiver DAG starts the receiver job. {look}"
    if dag.paused and not dag.gone:
        return f"The DAG {dag.dag_id} is paused in Airflow. Unpause it: its run starts the receiver job."
    if dag.running:
        return f"A run of {dag.dag_id} is running and starts the job again; its task's log says what prevents it."
    look = f"No run of {dag.dag_id} is running: look at its last run, and whether Airflow's scheduler is alive."
    return _restore(dag) if dag.gone else look


# -- less severe -------------------------------------------------------------------------------------------------------


def _behind(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    # Batches wait for blocks that are stored late, so what stores them slowly is the cause of all three.
    slow_to_store = evidence.slow_parts
    cause = "".join(f"; {part}" for part in slow_to_store)
    storing = " ".join(part.remedy for part in slow_to_store)
    is_named = False
    slow = slow_runs_of(overview.recent, overview.stream.batch_interval_ms)
    if slow is not None and overview.recent[0].allocated_at_ms > overview.now_ms - 1000 * 2 * evidence.limit_seconds:
        text = slow.text(coalesces=evidence.coalesces)
        is_named = True
        yield Finding(
            State.FALLING_BEHIND,
            f"{text[0].upper()}{text[1:].partition('. Give')[0]}{cause}.",
            storing or "Give the stream a longer batch_interval, or its batch DAG single_task=True.",
            overview.now_ms - slow.late_ms,
        )
    transactions = [] if evidence.stopped else open_transactions(overview.receivers, overview.now_ms)
    if transactions:
        yield _open_transaction(transactions, overview.now_ms)
    lag = None if transactions else evidence.lag_seconds
    if lag is not None and lag > evidence.limit_seconds and not evidence.has_paused_receivers:
        is_named = True
        yield Finding(
            State.FALLING_BEHIND,
            f"The receivers are {readable_seconds(lag)} behind Kafka{cause}.",
            storing
            or "Give the input more receivers, or raise limits.max_rate if it is set. The list of partitions shows "
            "where the lag is.",
            overview.now_ms - int(lag * 1000),
        )
    oldest = evidence.oldest
    late_seconds = 0.0 if oldest is None else evidence.late_seconds(oldest.due_ms)
    if (
        oldest is not None
        and slow is None
        and not is_standing_still(evidence)
        and late_seconds > evidence.limit_seconds
    ):
        late = readable_seconds(late_seconds)
        again = oldest.completed_before
        is_named = is_named or not again
        yield Finding(
            State.FALLING_BEHIND,
            f"Batch {time_text(oldest.batch_time_ms)} had completed before, and is being run again for {late}."
            if again
            else f"Batch {time_text(oldest.batch_time_ms)} is late by {late}{cause}.",
            (storing if not again else "")
            or "Other batches complete. Its page, and `headrace batches show`, say what it waits for.",
            oldest.due_ms,
        )
    if not is_named and overview.job is not None and overview.job.alive(overview.now_ms):
        for part in slow_to_store:
            yield Finding(State.WELL, f"Storing is slow: {part}.", part.remedy)


def _open_transaction(transactions: Sequence[Mapping[str, Any]], now_ms: int) -> Finding:
    first = transactions[0]
    topic, partition, since_ms = first["topic"], first["partition"], int(first["since_ms"])
    others = f", and {len(transactions) - 1} more partitions wait for one" if len(transactions) > 1 else ""
    return Finding(
        State.FALLING_BEHIND,
        f"Topic {topic}, partition {partition}: a producer's transaction has been open at offset {first['offset']} for "
        f"at least {readable_seconds((now_ms - since_ms) / 1000)}. "
        f"The {first['behind']:,} offsets from there on cannot be read until it ends{others}.",
        f"`kafka-transactions.sh --bootstrap-server SERVER describe-producers --topic {topic} --partition {partition}` "
        "names the producer. It commits, or Kafka aborts it after its transaction.timeout.ms; "
        "`kafka-transactions.sh abort` does so at once.",
        since_ms,
    )


def _paused(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    for receiver in overview.receivers:
        if receiver.paused_reason and receiver.alive(overview.now_ms) and not evidence.stopped:
            yield Finding(
                State.PAUSED,
                f"Receiver {receiver.receiver_id} is paused: {receiver.paused_reason.rstrip('.')}.",
                "If its disk is full, make room in the stream's storage; if its log has reached max_log_bytes, see "
                "what delays the batches. It then continues by itself. Kafka keeps the records until then: mind the "
                "topic's retention.",
            )


def _stopped(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    if not evidence.stopped:
        return
    if overview.job is not None and overview.job.alive(overview.now_ms):
        yield Finding(
            State.STOPPED,
            "It was asked to stop: the receivers store what they have read, then they end.",
            None,
            overview.job.stop_requested_at_ms,
        )
        return
    left = "" if evidence.oldest is None else " Batches go on until all records are written."
    since_ms = overview.stream.updated_at_ms if overview.job is None else overview.job.ended_at_ms
    yield Finding(
        State.STOPPED, f"A person has stopped it; nothing is received.{left}", "Start it to receive again.", since_ms
    )


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    now_ms = evidence.overview.now_ms
    found = differing_clock(receiver for receiver in evidence.overview.receivers if receiver.alive(now_ms))
    if found is not None:
        receiver, ahead = found
        yield Finding(
            State.WELL,
            f"The clock of {receiver.host}, where receiver {receiver.receiver_id} runs, is "
            f"{readable_seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the ledger's clock.",
            "Correct the clock of that host, or of the ledger's database if that one is wrong. Batch times are by the "
            "ledger's clock, whatever that of the host is.",
        )


def _dead_letters(evidence: Evidence) -> Iterator[Finding]:
    overview = evidence.overview
    if overview.dead_letters:
        number = f"{overview.dead_letters:,} dead letters" if overview.dead_letters > 1 else "1 dead letter"
        newest = f"the last {len(overview.recent)} batches have" if len(overview.recent) > 1 else "the last batch has"
        yield Finding(
            State.WELL,
            f"{newest[0].upper()}{newest[1:]} {number}.",
            "The list of dead letters shows the reason of each. Correct the index's mapping and replay them, or "
            "correct the decoder or the transform and run the batches again.",
        )


def _well(evidence: Evidence) -> Finding:
    last = evidence.overview.last_completed
    if last is None and evidence.oldest is not None:
        time = time_text(evidence.oldest.batch_time_ms)
        return Finding(State.WELL, f"It receives; batch {time}, its first with records, is not completed yet.")
    if last is None:
        return Finding(State.WELL, "It receives, and waits for its first records.")
    return Finding(State.WELL, f"Batch {time_text(last.batch_time_ms)} has completed, and none is late.")
