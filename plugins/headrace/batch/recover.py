"""Recovery: rebuild a stream's lost ledger, or restore its lost checkpoints, results and manifests (`recover`).

`recover_if_lost` does it without a person, as Spark's ``StreamingContext.getOrCreate``: ``Stream.recover``.
`refuse_if_lost` detects a lost ledger: the stream's folder has a log or a checkpoint of which the ledger knows nothing.
`found_files` reads the files, `rebuilt_stream` derives the ledger's state from them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from headrace.batch.allocation import restore_manifest
from headrace.batch.checkpoint import (
    CheckpointError,
    SavedState,
    checkpoint_now,
    checkpoint_paths,
    find_newest,
    read_newest,
)
from headrace.batch.found_files import FolderContents, Progress, read_folder, spans_of
from headrace.batch.manifest import FOLDER, LOG_FOLDER, Manifest, ManifestError
from headrace.batch.rebuilt_stream import rebuild_stream
from headrace.batch.results import lost_results
from headrace.batch.set_back import refuse_if_set_back
from headrace.clock import readable_seconds, time_text
from headrace.errors import Failure, HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerError, StreamNotFoundError
from headrace.ledger.states import BatchState, EventKind, PartitionState
from headrace.ledger.tables import Declared, StreamRevision, StreamRow
from headrace.stream import Input, Stream
from headrace.stream.model import StreamDefinitionError
from headrace.stream.stream import code_in, without_code
from headrace.stream_context import StreamContext
from headrace.wal.frame import segments_in
from headrace.wal.log_storage import LogStorage
from headrace.wal.scan import RecoveryMode

LEASE_MS = 60_000
"""How long a process of a lost ledger is assumed to live on; a longer lease in the stream's folder overrides it."""


class RecoveryRefusedError(HeadraceError):
    """Recovery is not safe, or there is nothing to recover from."""


class MayStillRunError(RecoveryRefusedError):
    """A process of the lost ledger may still run; in ``left_ms`` milliseconds it can be taken for ended.

    ``is_ahead``: its last sign of life is so far ahead of this clock that one of the clocks must be wrong.
    """

    left_ms: int = 0
    is_ahead: bool = False


class Step(StrEnum):
    """One kind of change that a recovery makes."""

    LEDGER_REBUILT = "ledger_rebuilt"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    RESULTS_WRITTEN = "results_written"
    MANIFESTS_WRITTEN = "manifests_written"
    MANIFESTS_DELETED = "manifests_deleted"


@dataclass
class Recovered:
    """What was found and done; in a dry run, what would be done.

    ``steps`` describes each change in words. ``notices`` say what was skipped, dropped or decided.
    """

    stream: str
    dry_run: bool
    steps: dict[Step, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "steps": {step.value: text for step, text in self.steps.items()}}


def recover(
    stream_name: str,
    ledger: Ledger,
    folder: LogStorage,
    *,
    definition: Stream | None = None,
    mode: RecoveryMode = RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS,
    dry_run: bool = False,
    force: bool = False,
    check: Callable[[FolderContents], None] = lambda _: None,
    accept_code: Callable[[Sequence[str]], bool] = lambda _: False,
    progress: Progress = lambda _: None,
) -> Recovered:
    """Rebuild the stream's ledger if it is lost; otherwise restore its lost checkpoints, results and manifests.

    Each step can be repeated: run an interrupted recovery again.

    Args:
        folder: the stream's folder in its storage.
        definition: the stream's definition in a rebuilt ledger. Without it that of the checkpoint is used, so it is
            needed if all checkpoints are lost too. A ledger that is not lost keeps its own; a notice says so if this
            one is another.
        mode: what to do about a damaged log.
        dry_run: report what would be done, and change nothing.
        force: recover even while a receiver job or a batch of the lost ledger could still run. Both are fenced.
        check: gets the contents of the folder before the ledger is rebuilt, and raises to refuse them.
        accept_code: gets what chooses the code that runs (`Stream.named_code`) in the definition of the checkpoint, if
            that is to be used, and returns whether to use it. A checkpoint's checksum detects damage, not forgery.

    Raises:
        RecoveryRefusedError: there is nothing to recover from, the folder is another stream's, its definition does not
            fit the given one, or names code that is not accepted.
        MayStillRunError: a receiver job or a batch could still run.
        LedgerSetBackError: the ledger is not lost, and is older than the folder.
        WalError: the log is damaged, and the mode does not skip damage.
        ManifestError, ResultError, CheckpointVersionError: a file that is needed cannot be read.
        ContradictionError: the files contradict each other.
    """
    report = Recovered(stream_name, dry_run)
    why: str | None = "the ledger was rebuilt"
    if is_lost(stream_name, ledger, folder):
        # Before the reading, which may take longer than a lease: it does not see what is written meanwhile.
        now_ms = ledger.now_ms()
        contents = read_folder(folder, stream_name, mode=mode, progress=progress)
        _refuse_without_contents(contents, definition, folder)
        _refuse_another_name(contents, folder)
        check(contents)
        if not force:
            _refuse_while_alive(contents, now_ms)
        if contents.saved.stream is not None:
            _check_definition(contents.saved.stream, contents.saved.path, definition, accept_code, report)
            saved = _without_others_code(contents.saved, definition, accept_code, report)
            contents = replace(contents, saved=saved)
        _rebuild(contents, ledger, folder, definition, force=force, report=report, progress=progress)
    else:
        context = _registered(stream_name, ledger, folder)
        refuse_if_set_back(context)
        progress("checking the results")
        _forget_lost_results(context, report)
        progress("checking the manifests")
        _write_manifests(context, report)
        _delete_manifests(context, report)
        why = _why_a_checkpoint(context, report)
        _note_other_definition(ledger.streams.get(stream_name).definition, definition, report)
    if why is not None:
        report.steps[Step.CHECKPOINT_WRITTEN] = f"a checkpoint, since {why}"
        if not dry_run:
            _write_checkpoint(_registered(stream_name, ledger, folder), why)
    return report


def _registered(stream_name: str, ledger: Ledger, folder: LogStorage) -> StreamContext:
    """The stream by its definition in the ledger, and in the given folder: it may not be where the definition says."""
    return StreamContext(Stream.from_json(ledger.streams.get(stream_name).definition), ledger, storage=folder)


def _refuse_without_contents(contents: FolderContents, definition: Stream | None, folder: LogStorage) -> None:
    if contents.saved.stream is None and not contents.frames and not contents.manifests:
        raise RecoveryRefusedError(
            f"{folder.url} holds no checkpoint, no manifest and no block of stream {contents.stream!r}, and the ledger "
            "does not know it.",
            remedy="Give the storage that the stream's definition names (--storage).",
        )
    if contents.saved.stream is None and definition is None:
        raise RecoveryRefusedError(
            f"The ledger of stream {contents.stream!r} is lost, and no checkpoint can be read: "
            f"{'; '.join(contents.notices)}",
            remedy="Give its definition (--definition module:attribute).",
        )


def _refuse_another_name(contents: FolderContents, folder: LogStorage) -> None:
    """Refuse a folder that was renamed or copied: its files, frame by frame, are those of a stream of another name."""
    named = {frame.info.receiver.stream for frame in contents.frames}
    named |= {row.stream for of_time in contents.manifests.values() for each in of_time for row in each.inputs}
    named |= set() if contents.saved.stream is None else {contents.saved.stream.name}
    others = sorted(named - {contents.stream})
    if others:
        raise RecoveryRefusedError(
            f"{folder.url} holds the data of stream {', '.join(map(repr, others))}, not of {contents.stream!r}.",
            remedy="Recover it by its own name, in a folder of this name. To go on by another name, define a stream "
            "with the positions of the recovered one as its starting_offsets (docs/guides/change-a-stream.md).",
        )


def _check_definition(
    saved: StreamRow,
    path: str | None,
    given: Stream | None,
    accept_code: Callable[[Sequence[str]], bool],
    report: Recovered,
) -> None:
    """Refuse a given definition of another batch interval, and, without one, the checkpoint's code unless accepted."""
    name, interval_ms = saved.name, saved.batch_interval_ms
    if given is not None:
        if given.batch_interval_ms != interval_ms:
            raise RecoveryRefusedError(
                f"The batches of stream {name!r} are of {interval_ms} ms by its checkpoint, and of "
                f"{given.batch_interval_ms} ms by the given definition.",
                remedy="Give the definition the batch interval that the stream had. A stream with another name can "
                "have another.",
            )
        if Stream.from_json(saved.definition).to_json() != given.to_json():
            report.notices.append("the given definition differs from that of the checkpoint; the given one is used")
        return
    code = Stream.from_json(saved.definition).named_code
    report.notices += [
        f"The definition is that of the checkpoint, which chooses the code that runs: {difference}"
        for difference in code
    ]
    if code and not report.dry_run and not accept_code(code):
        raise RecoveryRefusedError(
            f"The checkpoint {path} of stream {name!r} chooses the code that runs, and anyone who can "
            f"write into the folder can have written it: {'; '.join(code)}.",
            remedy="Give the stream's own definition (--definition module:attribute); or, if all of this is the "
            "stream's, say --accept-code.",
        )


def _without_others_code(
    saved: SavedState,
    given: Stream | None,
    accept_code: Callable[[Sequence[str]], bool],
    report: Recovered,
) -> SavedState:
    """The checkpoint's definitions, each without code that neither the definition that is used names nor a person
    accepts: whoever can write into the folder can have written them, and a process asks for a definition by its
    revision. The current definition is taken from the stream's row, so that there is one copy of it.
    """
    current = saved.stream
    if current is None:
        return saved
    used = given.named_code if given is not None else _code_in(current.definition)
    older = [row for row in saved.revisions if row.revision != current.revision]
    texts = [
        current.definition,
        *(row.definition for row in older),
        *(row.definition for row in saved.replay_definitions),
    ]
    others = sorted({code for text in texts for code in _code_in(text)} - set(used))
    allowed = set(used)
    if others and not report.dry_run and accept_code(others):
        allowed.update(others)
    else:
        report.notices += [
            "A definition in the checkpoint, an earlier one of the stream or a replay's, chooses code that the one in "
            f"use does not: {code}. It is recorded without this."
            for code in others
        ]

    def safe(text: str) -> str:
        return text if allowed.issuperset(_code_in(text)) else json.dumps(without_code(_fields(text)))

    current = replace(current, definition=safe(current.definition))
    if given is not None and not _is_valid(current.definition):
        # Without the class of a receiver, for example, it is no definition.
        current = replace(current, **Declared.by(given).columns())
    rows = [
        StreamRevision(
            **Declared.of(current).columns(), revision=current.revision, created_at_ms=current.updated_at_ms
        ),
        *(replace(row, definition=safe(row.definition)) for row in reversed(older)),
    ]
    # Without their code, two definitions may be the same: the first of these rows counts.
    distinct = {Declared.of(row).digest: row for row in reversed(rows)}
    return replace(
        saved,
        stream=current,
        revisions=sorted(distinct.values(), key=lambda row: row.revision),
        replay_definitions=[replace(row, definition=safe(row.definition)) for row in saved.replay_definitions],
    )


def _is_valid(definition: str) -> bool:
    try:
        Stream.from_json(definition)
    except StreamDefinitionError:
        return False
    return True


def _code_in(definition: str) -> list[str]:
    return code_in(_fields(definition))


def _fields(definition: str) -> dict[str, Any]:
    try:
        fields = json.loads(definition)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _note_other_definition(used: str, given: Stream | None, report: Recovered) -> None:
    """Report that the recorded definition stays: batches refer to its revisions, and the DAGs register the next one."""
    if given is not None and Stream.from_json(used).to_json() != given.to_json():
        report.notices.append(
            "the given definition differs from the recorded one, which is used; the next run of the stream's DAGs "
            "registers theirs"
        )


def _refuse_while_alive(contents: FolderContents, now_ms: int) -> None:
    """Refuse while a process of the lost ledger could still write to the log. Its new blocks would not count."""
    left_ms = contents.last_sign_ms + max(contents.lease_ms, LEASE_MS) - now_ms
    if left_ms > 0:
        seconds = (now_ms - contents.last_sign_ms) / 1000
        is_behind = seconds < 0
        age = f"{readable_seconds(abs(seconds))} {'ahead of the clock of this machine' if is_behind else 'ago'}"
        error = MayStillRunError(
            f"The last sign of life in the folder of stream {contents.stream!r} is of "
            f"{time_text(contents.last_sign_ms)}, {age}: its receiver job, or a batch, could still live.",
            remedy=f"{'Correct this clock if it is behind. ' if is_behind else ''}Pause the stream's DAGs and run "
            f"`headrace streams stop {contents.stream} --storage URL`, which ends the job without its ledger. Then try "
            f"again in {readable_seconds(left_ms // 1000 + 1)}; or say --force if neither runs.",
        )
        error.left_ms, error.is_ahead = left_ms, seconds * 1000 < -LEASE_MS
        raise error


def _rebuild(
    contents: FolderContents,
    ledger: Ledger,
    folder: LogStorage,
    definition: Stream | None,
    *,
    force: bool,
    report: Recovered,
    progress: Progress,
) -> None:
    progress("putting the ledger together")
    found, notices = rebuild_stream(contents, definition, now_ms=ledger.now_ms())
    states = [batch.row.state for batch in found.batches]
    report.counts |= {
        "segments": len(found.segments),
        "blocks": len(found.blocks),
        "positions": len(found.positions),
        "batches": len(found.batches),
        "undecided_blocks": found.notes["undecided_blocks"],
        "refused_blocks": found.notes["refused_blocks"],
        "gaps_found": len(found.found_gaps),
        **{f"batches_{state.value}": states.count(state) for state in BatchState if state in states},
    }
    report.notices += notices
    report.steps[Step.LEDGER_REBUILT] = (
        f"the ledger from {found.notes['checkpoint'] or 'no checkpoint'}, {len(found.batches)} batches and "
        f"{len(found.blocks)} blocks"
    )
    if not report.dry_run:
        progress("writing the ledger")
        ledger.rebuild.restore(contents.stream, found, force=force)
        _registered(contents.stream, ledger, folder).storage.mark.leave(attempt=found.last_attempt)


def _forget_lost_results(context: StreamContext, report: Recovered) -> None:
    """Mark the batches of lost or damaged result files, so that the checkpoint writes them again."""
    results = context.ledger.results
    lost = lost_results(context.storage, results.written(context.name))
    report.notices += lost.values()
    if lost:
        report.steps[Step.RESULTS_WRITTEN] = f"{len(lost)} results"
        if not report.dry_run:
            results.forget(context.name, lost)


def _write_manifests(context: StreamContext, report: Recovered) -> None:
    """Write missing or damaged manifests again from the ledger's blocks, where possible."""
    written = 0
    for batch in context.ledger.batches.uncleaned(context.name):
        file = batch.manifest_uri.rpartition("/")[2]
        try:
            Manifest.load(f"{context.storage.url}/{FOLDER}/{file}", sha256=batch.manifest_sha256)
        except ManifestError as error:
            report.notices.append(error.what)
            if report.dry_run or restore_manifest(context, batch):
                written += 1
            else:
                report.notices.append(
                    f"The manifest of batch {time_text(batch.batch_time_ms)} cannot be written again."
                )
    if written:
        report.steps[Step.MANIFESTS_WRITTEN] = f"{written} manifests"


def _delete_manifests(context: StreamContext, report: Recovered) -> None:
    """Delete manifests that overtaken or crashed allocations left: their batch permanently names another one."""
    folder, left = context.storage, []
    for path in folder.paths(FOLDER):
        batch_time_ms, dash, _ = path.removeprefix(f"{FOLDER}/").partition("-")
        if not (dash and batch_time_ms.isdigit()):
            continue
        batch = context.ledger.batches.find(context.name, int(batch_time_ms))
        if batch is not None and batch.manifest_uri.rpartition("/")[2] != path.rpartition("/")[2]:
            left.append(path)
    if left:
        report.steps[Step.MANIFESTS_DELETED] = f"{len(left)} manifests that no batch names"
        for path in () if report.dry_run else left:
            folder.delete(path)


def _write_checkpoint(context: StreamContext, why: str) -> None:
    newest = context.ledger.batches.page(context.name, limit=1)
    batch_time_ms = newest[0].batch_time_ms if newest else context.ledger.now_ms()
    written = checkpoint_now(context, batch_time_ms)
    context.ledger.events.append(context.name, EventKind.CHECKPOINT_REWRITTEN, {"path": written.path, "why": why})


def _why_a_checkpoint(context: StreamContext, report: Recovered) -> str | None:
    """Why the existing checkpoints do not hold what the ledger says they hold; None if they do."""
    if Step.RESULTS_WRITTEN in report.steps:
        return "results were lost"
    done = context.ledger.batches.page(context.name, limit=1, states=[BatchState.COMPLETED])
    if not done and not checkpoint_paths(context.storage):
        return None
    try:
        newest = find_newest(context.storage)
    except CheckpointError as error:
        return error.what
    report.notices += [f"The checkpoint {path} is passed over: {why}." for path, why in newest.passed_over.items()]
    return "the newest is damaged" if newest.passed_over else None


# A receiver without its ledger may write one more block, and ends within a minute.
_MAX_WAITS = 3


def recover_if_lost(
    context: StreamContext, *, progress: Progress = lambda _: None, wait: Callable[[float], object] | None = None
) -> Recovered | None:
    """Rebuild the stream's ledger if the ledger does not know the stream, and its folder holds data of an earlier one.

    Waits until no process of the lost ledger can still run: for its lease or a minute after the last sign of it.
    ``wait`` waits some seconds, by default on the stream's clock.
    Returns None if nothing was lost.

    Raises:
        RecoveryRefusedError: the folder holds the data of another stream, or a process still writes to it, or a clock
            is wrong.
        WalError, ManifestError, ResultError, CheckpointVersionError, ContradictionError: as `recover`.
    """
    wait = wait or partial(context.clock.wait, threading.Event())
    lost = _what_is_lost(context)
    if lost is not None:
        progress(f"{lost} The ledger is rebuilt from there.")
    waits = 0
    while _what_is_lost(context) is not None:
        try:
            done = recover(
                context.name,
                context.ledger,
                context.storage,
                definition=context.stream,
                check=lambda contents: _refuse_another_stream(contents, context.stream),
                progress=progress,
            )
            # Another task may have rebuilt it just before.
            return done if Step.LEDGER_REBUILT in done.steps else None
        except MayStillRunError as error:
            if error.is_ahead:
                # The wait could take days.
                raise
            if waits == _MAX_WAITS:
                raise RecoveryRefusedError(
                    f"The ledger does not know stream {context.name!r}, and a process writes to its folder "
                    f"{context.stream.folder_url} all the same: it has another ledger.",
                    remedy="Name the ledger that the running receiver job has. If that one is lost, stop the job: "
                    f"`headrace streams stop {context.name} --storage {context.stream.storage.url}`.",
                ) from error
            waits += 1
            progress(f"a process of the lost ledger may still run; waiting {error.left_ms / 1000:.0f} s for its end")
            wait(error.left_ms / 1000 + 0.001)
        except LedgerError:
            # Another task may have rebuilt it in the meantime.
            if _what_is_lost(context) is not None:
                raise
    return None


def _what_is_lost(context: StreamContext) -> str | None:
    try:
        refuse_if_lost(context)
    except LostLedgerError as lost:
        return lost.what
    return None


def _refuse_another_stream(contents: FolderContents, stream: Stream) -> None:
    """Refuse a folder whose records are not of this stream's inputs: its offsets would say nothing about them."""
    saved = contents.saved.stream
    inputs = {source.id: source for source in stream.inputs}
    if saved is not None:
        for recorded in Stream.from_json(saved.definition).inputs:
            source = inputs.get(recorded.id)
            if source is not None and _origin(source) != _origin(recorded):
                raise _of_another(stream, f"input {recorded.id!r} was received from {_origin(recorded)}")
    in_log = (key for frame in contents.frames for key, _ in spans_of(frame.info))
    positions = contents.saved.positions
    # Partitions of an input or a topic that was removed from the definition since. Their segments may still be there.
    ended = {place for place, row in positions.items() if row.state is PartitionState.ENDED}
    received = {*contents.positions, *positions, *in_log} - ended
    for input_id, topic in sorted({(input_id, partition.topic) for input_id, partition in received}):
        source = inputs.get(input_id)
        if source is None or not source.matches(topic):
            raise _of_another(stream, f"it holds records of topic {topic!r}, received for input {input_id!r}")


def _origin(source: Input) -> str:
    return source.description[0]


def _of_another(stream: Stream, why: str) -> RecoveryRefusedError:
    return RecoveryRefusedError(
        f"The ledger does not know stream {stream.name!r}, and the data in {stream.folder_url} does not fit its "
        f"definition: {why}.",
        remedy=f"If it is this stream's all the same: `headrace streams recover {stream.name} --storage "
        f"{stream.storage.url}`. To start without this data, give the stream another name, or move the folder away.",
    )


class LostLedgerError(HeadraceError):
    """The stream has been received before, and the ledger does not know it."""

    failure = Failure.FINAL


def refuse_if_lost(context: StreamContext) -> None:
    """Refuse to begin a stream whose folder holds data of an earlier ledger.

    The stream would be received again from its starting offsets, which contradicts the existing log and manifests.

    Raises:
        LostLedgerError: the ledger does not know the stream, and its folder has a log or a checkpoint.
    """
    stream = context.stream
    try:
        context.ledger.streams.get(stream.name)
    except StreamNotFoundError:
        pass
    else:
        return
    if checkpoint_paths(context.storage) or _has_log(context.storage):
        error = LostLedgerError(
            f"The ledger does not know stream {stream.name!r}, which has a log in {stream.folder_url}.",
            remedy="The task of its receiver job rebuilds the ledger."
            if stream.recover == "automatic"
            else f"If its ledger was lost: `headrace streams recover {stream.name} --storage {stream.storage.url}`. "
            "If it is elsewhere, name that one. To start without this data, give the stream another name, or move the "
            "folder away.",
        )
        if stream.recover == "automatic":
            error.failure = Failure.PASSING
        raise error


def is_lost(stream_name: str, ledger: Ledger, folder: LogStorage) -> bool:
    """Whether the ledger of the stream is lost: it does not know the stream, or the stream was registered again and has
    received nothing."""
    if not ledger.rebuild.is_new(stream_name):
        return False
    try:
        created_at_ms = ledger.streams.get(stream_name).created_at_ms
        return bool(read_newest(folder).state["stream"]["created_at_ms"] != created_at_ms)
    except StreamNotFoundError:
        return True
    except CheckpointError:
        # Without a checkpoint, segments in the log are the only sign that an earlier ledger was lost.
        return _has_log(folder)


def _has_log(folder: LogStorage) -> bool:
    return bool(segments_in(folder.below(LOG_FOLDER).paths()))
