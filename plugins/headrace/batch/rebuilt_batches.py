"""Rebuilds the batches of a lost ledger from their manifests; their states come from checkpoint and history."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.batch.found_files import FolderContents, FoundManifest, Place, Span, is_done, listed_spans
from headrace.batch.manifest import ManifestError
from headrace.blocks import BlockHandle, BlockInfo
from headrace.clock import time_text
from headrace.ledger.allocations import late_records
from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.rebuild import FoundBatch, FoundBlock
from headrace.ledger.receiving_tables import StoredBlock
from headrace.ledger.states import BatchState
from headrace.ledger.tables import StreamRow


@dataclass(frozen=True)
class RebuiltBatches:
    """The batches, and those of their blocks that are in the log, each batch's in its manifest's order."""

    batches: Sequence[FoundBatch]
    blocks: Sequence[FoundBlock]
    notices: Sequence[str]


def rebuild_batches(
    contents: FolderContents,
    stream: StreamRow,
    accepted: Mapping[BlockHandle, BlockInfo],
    *,
    folder_url: str,
    coalesces: bool,
    now_ms: int,
) -> RebuiltBatches:
    """Derive the batches from manifests, checkpoint and history.

    Args:
        accepted: the log's blocks that count, by handle.
        folder_url: the stream's folder, for the manifest URIs in the ledger.

    Raises:
        ManifestError: a batch's manifest is missing or damaged. Without it the batch's records would go into another.
    """
    saved = {} if contents.saved is None else contents.saved.batches
    left = _left_manifests(contents.manifests, saved)
    counting = {time_ms: of_time for time_ms, of_time in contents.manifests.items() if time_ms not in left}
    contents = dataclasses.replace(contents, manifests=counting)
    finder = _Finder(contents, stream, accepted, folder_url=folder_url, coalesces=coalesces, now_ms=now_ms)
    finder.notices += [
        f"The manifest of batch {time_text(time_ms)} does not count: batch {time_text(by_ms)} took its records over."
        for time_ms, by_ms in left.items()
    ]
    for batch_time_ms in sorted({*saved, *contents.manifests}):
        if batch_time_ms in saved:
            finder.known(batch_time_ms)
        else:
            finder.unknown(batch_time_ms)
    return RebuiltBatches(finder.batches, finder.blocks, finder.notices)


class _Finder:
    def __init__(
        self,
        contents: FolderContents,
        stream: StreamRow,
        accepted: Mapping[BlockHandle, BlockInfo],
        *,
        folder_url: str,
        coalesces: bool,
        now_ms: int,
    ) -> None:
        self._contents = contents
        self._stream = stream
        self._accepted = accepted
        self._folder_url = folder_url
        self._coalesces = coalesces
        self._now_ms = now_ms
        self._saved = {} if contents.saved is None else contents.saved.batches
        self._absorbed: set[int] = set()
        self.batches: list[FoundBatch] = []
        self.blocks: list[FoundBlock] = []
        self.notices: list[str] = []

    def known(self, batch_time_ms: int) -> None:
        """Add a batch that the checkpoint or the history has."""
        saved = self._saved[batch_time_ms]
        if saved.row.state is BatchState.ABSORBED:
            self.batches.append(saved)
            return
        name = saved.row.manifest_uri.rpartition("/")[2]
        if saved.row.cleaned_at_ms is not None and not self._has(batch_time_ms, name):
            self.notices.append(
                f"Batch {time_text(batch_time_ms)} is over, and its manifest {name} is gone: it cannot be run again."
            )
            self.batches.append(saved)
            return
        manifest = self._manifest_of(batch_time_ms, name)
        if manifest.sha256 != saved.row.manifest_sha256:
            raise ManifestError(
                f"The manifest {self._folder_url}/{manifest.path} is not the one by which batch "
                f"{time_text(batch_time_ms)} was allocated.",
                remedy="Restore it from a copy.",
            )
        taken = self._take(manifest, batch_time_ms, saved.row.absorbed)
        row = saved.row
        if row.state is BatchState.COMPLETED and row.checkpointed_at_ms is None and self._is_gone(manifest):
            # Its log was deleted, so a checkpoint holds it: this one.
            row = dataclasses.replace(row, checkpointed_at_ms=self._now_ms)
        # The log of a cleaned batch was deleted when it had completed; it was repeated since.
        if not is_done(row) and row.cleaned_at_ms is None and self._was_deleted(manifest):
            # A newer checkpoint, which is damaged, recorded it as finished.
            row = self._as_over(row, is_cleaned=not taken)
        elif row.state is BatchState.RUNNING:
            # Its attempt was lost with the ledger.
            row = dataclasses.replace(row, state=BatchState.ALLOCATED)
        if row.cleaned_at_ms is None and row.blocks > len(taken) == 0 and is_done(row):
            row = dataclasses.replace(row, cleaned_at_ms=self._now_ms, cleanup={})
        self.batches.append(dataclasses.replace(saved, row=row, inputs=manifest.inputs))

    def unknown(self, batch_time_ms: int) -> None:
        """Add a batch that has only a manifest: allocated since the checkpoint, or without any checkpoint."""
        if batch_time_ms in self._absorbed:
            return
        manifest = self._choose(batch_time_ms)
        absorbed = self._absorbed_by(manifest, batch_time_ms)
        taken = self._take(manifest, batch_time_ms, absorbed)
        row = BatchRow(
            stream=self._stream.name,
            batch_time_ms=batch_time_ms,
            interval_ms=manifest.interval_ms,
            state=BatchState.ALLOCATED,
            revision=self._stream.revision,
            manifest_uri=f"{self._folder_url}/{manifest.path}",
            manifest_sha256=manifest.sha256,
            code_version=None,
            blocks=manifest.blocks,
            records=manifest.records,
            payload_bytes=manifest.payload_bytes,
            absorbed=absorbed,
            absorbed_by_ms=None,
            attempt=0,
            allocated_at_ms=self._now_ms,
            started_at_ms=None,
            completed_at_ms=None,
            checkpointed_at_ms=None,
            checkpoint_uri=None,
            cleaned_at_ms=None,
            cleanup=None,
            error=None,
            late_records=late_records(
                self._stream, [StoredBlock(0, block.batch_time_ms, self._now_ms, block.info) for block in taken]
            ),
            built=manifest.is_built,
        )
        outputs: dict[str, dict[str, object]] = {}
        if self._was_deleted(manifest):
            row = self._as_over(row, is_cleaned=not taken)
            outputs = {step: {} for step in self._stream.outputs}
        self.batches.append(FoundBatch(row, manifest.inputs, outputs))
        for absorbed_ms in absorbed:
            if absorbed_ms not in self._saved:
                self._absorbed.add(absorbed_ms)
                self.batches.append(FoundBatch(_absorbed_row(row, absorbed_ms)))

    def _as_over(self, row: BatchRow, *, is_cleaned: bool) -> BatchRow:
        self.notices.append(
            f"Batch {time_text(row.batch_time_ms)} is in no checkpoint, and its log was deleted, as is done with "
            "batches that are "
            "over: it counts as completed."
        )
        return dataclasses.replace(
            row,
            state=BatchState.COMPLETED,
            steps=self._stream.outputs,
            required=self._stream.outputs,
            started_at_ms=self._now_ms,
            completed_at_ms=self._now_ms,
            checkpointed_at_ms=self._now_ms,
            cleaned_at_ms=self._now_ms if is_cleaned else None,
            cleanup={} if is_cleaned else None,
        )

    def _was_deleted(self, manifest: FoundManifest) -> bool:
        """Whether cleanup has deleted a segment of a batch that is unfinished in the newest valid checkpoint.

        If so, the batch was finished and must not be run again: cleanup deletes a segment only after all its batches.
        Cleanup deletes only what a checkpoint has as finished, so it can have done this only if a newer checkpoint is
        damaged or there is none. Otherwise somebody else deleted it.
        """
        if not self._is_gone(manifest):
            return False
        saved = self._contents.saved
        if saved is None or saved.passed_over:
            return True
        self.notices.append(
            f"Batch {time_text(manifest.batch_time_ms)} is not over, and its log is gone: it reads Kafka."
        )
        return False

    def _is_gone(self, manifest: FoundManifest) -> bool:
        return any(segment not in self._contents.segments for segment in manifest.segments)

    def _has(self, batch_time_ms: int, name: str) -> bool:
        return any(
            manifest.path.rpartition("/")[2] == name for manifest in self._contents.manifests.get(batch_time_ms, ())
        )

    def _manifest_of(self, batch_time_ms: int, name: str) -> FoundManifest:
        for manifest in self._contents.manifests.get(batch_time_ms, ()):
            if manifest.path.rpartition("/")[2] == name:
                return manifest
        damaged = [why for path, why in self._contents.damaged_manifests.items() if path.endswith(f"/{name}")]
        raise ManifestError(
            damaged[0] if damaged else f"The manifest {name} of batch {time_text(batch_time_ms)} is missing.",
            remedy="Restore it from a copy: without it nobody knows which records the batch has.",
        )

    def _choose(self, batch_time_ms: int) -> FoundManifest:
        """Choose among several manifests of a batch time, which overtaken or crashed allocations leave.

        Prefers manifests whose blocks are accepted and in no other batch, then those with records, then those with more
        blocks, then the last name.
        """
        candidates = self._contents.manifests[batch_time_ms]
        if len(candidates) == 1:
            return candidates[0]
        others = listed_spans({ms: of_time for ms, of_time in self._contents.manifests.items() if ms != batch_time_ms})

        def worth(manifest: FoundManifest) -> tuple[bool, bool, int, str]:
            is_whole = all(handle in self._accepted for handle in manifest.in_log)
            is_disjoint = not any(
                start < other_until and other_start < until
                for place, (start, until) in manifest.spans
                for other_start, other_until in others.get(place, ())
            )
            return is_whole and is_disjoint, manifest.records > 0, manifest.blocks, manifest.path

        chosen = max(candidates, key=worth)
        self.notices.append(f"Batch {time_text(batch_time_ms)} has {len(candidates)} manifests: {chosen.path} counts.")
        return chosen

    def _absorbed_by(self, manifest: FoundManifest, batch_time_ms: int) -> tuple[int, ...]:
        """The earlier times whose blocks the batch absorbed: the times of its blocks' cuts that have no manifest."""
        if not self._coalesces:
            return ()
        times = {
            first_batch_time(self._stream, self._accepted[handle])
            for handle in manifest.in_log
            if handle in self._accepted
        }
        return tuple(
            sorted(
                t for t in times if t < batch_time_ms and t not in self._contents.manifests and t not in self._absorbed
            )
        )

    def _take(self, manifest: FoundManifest, batch_time_ms: int, absorbed: Sequence[int]) -> list[FoundBlock]:
        """The batch's blocks that are in the log, each with its batch time in the ledger."""
        taken = []
        for handle in manifest.in_log:
            info = self._accepted.get(handle)
            if info is not None:
                first_ms = first_batch_time(self._stream, info)
                own_ms = min((t for t in absorbed if t >= first_ms), default=batch_time_ms)
                taken.append(FoundBlock(info, own_ms))
        self.blocks += taken
        return taken


def _left_manifests(
    manifests: Mapping[int, Sequence[FoundManifest]], saved: Mapping[int, FoundBatch]
) -> dict[int, int]:
    """The times whose manifest counts as that of an allocation that did not get to the ledger, with a later time whose
    manifest lists all its records: most likely that batch absorbed the time."""
    listed: dict[Place, list[tuple[Span, int]]] = defaultdict(list)
    for time_ms, of_time in manifests.items():
        for place, span in {place_and_span for manifest in of_time for place_and_span in manifest.spans}:
            listed[place].append((span, time_ms))
    left: dict[int, int] = {}
    for spans in listed.values():
        reached_until, reached_ms = 0, 0
        for (start, until), time_ms in sorted(spans):
            if start < reached_until:
                earlier_ms, later_ms = sorted((time_ms, reached_ms))
                if earlier_ms not in saved and _holds_all(manifests[later_ms], manifests[earlier_ms]):
                    left[earlier_ms] = later_ms
            if until >= reached_until:
                reached_until, reached_ms = until, time_ms
    return left


def _holds_all(later: Sequence[FoundManifest], earlier: Sequence[FoundManifest]) -> bool:
    """Whether each manifest of one time lists all that any of another time lists."""
    return all(
        any(
            other_place == place and other[0] <= span[0] and span[1] <= other[1]
            for other_place, other in other_manifest.spans
        )
        for other_manifest in later
        for manifest in earlier
        for place, span in manifest.spans
    )


def first_batch_time(stream: StreamRow, info: BlockInfo) -> int:
    """The batch time that a block gets if this time is not sealed."""
    event_ms = info.event_time_ms
    cut_ms = info.cut_time_ms if event_ms is None else max(0, min(event_ms, info.cut_time_ms))
    return stream.batch_time_after(cut_ms)


def _absorbed_row(row: BatchRow, batch_time_ms: int) -> BatchRow:
    return dataclasses.replace(
        row,
        batch_time_ms=batch_time_ms,
        state=BatchState.ABSORBED,
        absorbed=(),
        absorbed_by_ms=row.batch_time_ms,
        blocks=0,
        records=0,
        payload_bytes=0,
        late_records=0,
        built=False,
        started_at_ms=None,
        completed_at_ms=None,
        checkpointed_at_ms=None,
        required=None,
        steps=None,
    )
