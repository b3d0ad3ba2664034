"""Rebuilds the batches of a lost ledger from their manifests; what became of them is in their results."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from headrace.batch.found_files import FolderContents, FoundManifest, Span, is_over, listed_spans
from headrace.batch.manifest import ManifestError
from headrace.batch.results import ResultError, StoredResult, result_name
from headrace.blocks import BlockHandle, BlockInfo, InputPartition
from headrace.clock import time_text
from headrace.ledger.batches.allocations import late_records
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.rebuild import FoundBatch
from headrace.ledger.receiving.tables import StoredBlock
from headrace.ledger.states import BatchState
from headrace.ledger.tables import StreamRow


@dataclass(frozen=True)
class RebuiltBatches:
    """The batches, and those of their blocks that are in the log, each batch's in its manifest's order."""

    batches: Sequence[FoundBatch]
    blocks: Sequence[StoredBlock]
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
    """Derive the batches from their manifests and results.

    Args:
        accepted: the log's blocks that count, by handle.
        folder_url: the stream's folder, for the manifest URIs in the ledger.

    Raises:
        ManifestError: a batch's manifest is missing or damaged. Without it the batch's records would go into another.
        ResultError: a batch's result is damaged, and its log was deleted: it may have completed.
    """
    results = contents.results.by_time
    left = _left_manifests(contents.manifests, results)
    counting = {time_ms: of_time for time_ms, of_time in contents.manifests.items() if time_ms not in left}
    contents = dataclasses.replace(contents, manifests=counting)
    finder = _Finder(contents, stream, accepted, folder_url, coalesces, now_ms)
    finder.notices += [
        f"The manifest of batch {time_text(time_ms)} does not count: batch {time_text(by_ms)} took its records over."
        for time_ms, by_ms in left.items()
    ]
    for batch_time_ms in sorted({*results, *contents.manifests}):
        if batch_time_ms in results:
            finder.known(batch_time_ms)
        else:
            finder.unknown(batch_time_ms)
    return RebuiltBatches(finder.batches, finder.blocks, finder.notices)


@dataclass
class _Finder:
    contents: FolderContents
    stream: StreamRow
    accepted: Mapping[BlockHandle, BlockInfo]
    folder_url: str
    coalesces: bool
    now_ms: int
    batches: list[FoundBatch] = field(default_factory=list)
    blocks: list[StoredBlock] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._results = self.contents.results.by_time
        self._absorbed = {time_ms for result in self._results.values() for time_ms in result.row.absorbed}
        # What is wrong with the damaged results of a batch, by the change in their names.
        self._damaged: dict[int, dict[int, str]] = defaultdict(dict)
        for path, why in self.contents.results.damaged.items():
            if (named := result_name(path)) is not None:
                self._damaged[named[0]][named[1]] = why

    def known(self, batch_time_ms: int) -> None:
        """Add a batch that has a result."""
        result = self._results[batch_time_ms]
        row, inputs = result.row, tuple[BatchInputRow, ...]()
        self.notices += [f"{why} An earlier one of the batch is used." for why in self._damaged[batch_time_ms].values()]
        name = row.manifest_uri.rpartition("/")[2]
        named = (m for m in self.contents.manifests.get(batch_time_ms, ()) if m.path.endswith(f"/{name}"))
        manifest = next(named, None)
        if manifest is not None:
            if manifest.sha256 != row.manifest_sha256:
                raise ManifestError(
                    f"The manifest {self.folder_url}/{manifest.path} is not the one by which batch "
                    f"{time_text(batch_time_ms)} was allocated.",
                    remedy="Restore it from a copy.",
                )
            inputs = manifest.inputs
            # The folder may be elsewhere than when the result was written.
            row = dataclasses.replace(row, manifest_uri=f"{self.folder_url}/{manifest.path}")
            taken = self._take(manifest, row.absorbed, is_over=is_over(row))
            if row.blocks > len(taken) == 0 and is_over(row):
                cleaned_at_ms = row.cleaned_at_ms or self.now_ms
                row = dataclasses.replace(row, cleaned_at_ms=cleaned_at_ms, cleanup=row.cleanup or {})
        elif is_over(row) and batch_time_ms < self._first_unlisted_ms:
            # Removal deletes the manifests of the oldest batches, then their results.
            self.notices.append(
                f"Batch {time_text(batch_time_ms)} is over, and its manifest {name} is gone: it cannot be run again."
            )
        else:
            damaged = [why for path, why in self.contents.damaged_manifests.items() if path.endswith(f"/{name}")]
            raise ManifestError(
                damaged[0] if damaged else f"The manifest {name} of batch {time_text(batch_time_ms)} is missing.",
                remedy="Restore it from a copy: only this file lists the records of the batch.",
            )
        if row.state is BatchState.RUNNING:
            # Its attempt was lost with the ledger.
            row = dataclasses.replace(row, state=BatchState.ALLOCATED)
        self._add(FoundBatch(row, inputs, result.outputs, result.replays, result.revisions))

    def unknown(self, batch_time_ms: int) -> None:
        """Add a batch that has only a manifest: no attempt at it has ended, or its result was not written yet."""
        if batch_time_ms in self._absorbed:
            return
        manifest = self._choose(batch_time_ms)
        for why in self._damaged[batch_time_ms].values():
            if self._is_gone(manifest):
                raise ResultError(
                    why,
                    remedy="Its log was deleted, so the batch has most likely completed. Restore the file from a copy. "
                    "Without one, delete it: the batch is run again from Kafka.",
                )
            self.notices.append(f"{why} The batch counts as not run.")
        absorbed = self._absorbed_by(manifest)
        taken = self._take(manifest, absorbed, is_over=False)
        row = BatchRow(
            stream=self.stream.name,
            batch_time_ms=batch_time_ms,
            interval_ms=manifest.interval_ms,
            state=BatchState.ALLOCATED,
            revision=self.stream.revision,
            manifest_uri=f"{self.folder_url}/{manifest.path}",
            manifest_sha256=manifest.sha256,
            blocks=manifest.blocks,
            records=manifest.records,
            payload_bytes=manifest.payload_bytes,
            absorbed=absorbed,
            allocated_at_ms=self.now_ms,
            late_records=late_records(self.stream, taken),
            built=manifest.is_built,
        )
        self._add(FoundBatch(row, manifest.inputs))

    def _add(self, batch: FoundBatch) -> None:
        # The name of the batch's next result has to be above all others.
        damaged = self._damaged[batch.row.batch_time_ms]
        row = dataclasses.replace(batch.row, change=max(batch.row.change, *(change + 1 for change in damaged), 1))
        self.batches.append(dataclasses.replace(batch, row=row))
        self.batches += [FoundBatch(row.absorbs(absorbed_ms)) for absorbed_ms in row.absorbed]
        self._absorbed.update(row.absorbed)

    def _is_gone(self, manifest: FoundManifest) -> bool:
        return any(segment not in self.contents.segments for segment in manifest.segments)

    @cached_property
    def _first_unlisted_ms(self) -> float:
        """The first batch time of the log's blocks that no manifest lists: from there on batches need theirs."""
        unlisted = self.accepted.keys() - self.contents.listed
        return min((first_batch_time(self.stream, self.accepted[handle]) for handle in unlisted), default=math.inf)

    def _choose(self, batch_time_ms: int) -> FoundManifest:
        """Choose among several manifests of a batch time, which overtaken or crashed allocations leave.

        Prefers manifests whose blocks are accepted and in no other batch, then those with records, then those with more
        blocks, then the last name.
        """
        candidates = self.contents.manifests[batch_time_ms]
        if len(candidates) == 1:
            return candidates[0]
        others = listed_spans({ms: of_time for ms, of_time in self.contents.manifests.items() if ms != batch_time_ms})

        def worth(manifest: FoundManifest) -> tuple[bool, bool, int, str]:
            is_whole = all(handle in self.accepted for handle in manifest.in_log)
            is_disjoint = not any(
                start < other_until and other_start < until
                for key, (start, until) in manifest.spans
                for other_start, other_until in others.get(key, ())
            )
            return is_whole and is_disjoint, manifest.records > 0, manifest.blocks, manifest.path

        chosen = max(candidates, key=worth)
        self.notices.append(f"Batch {time_text(batch_time_ms)} has {len(candidates)} manifests: {chosen.path} counts.")
        return chosen

    def _absorbed_by(self, manifest: FoundManifest) -> tuple[int, ...]:
        """The earlier times whose blocks the batch absorbed: the times of its blocks' cuts that have no manifest."""
        listed = (self.accepted[handle] for handle in manifest.in_log if handle in self.accepted)
        times = {first_batch_time(self.stream, info) for info in listed} if self.coalesces else set()
        earlier = sorted(time_ms for time_ms in times if time_ms < manifest.batch_time_ms)
        return tuple(t for t in earlier if t not in self.contents.manifests and t not in self._absorbed)

    def _take(self, manifest: FoundManifest, absorbed: Sequence[int], *, is_over: bool) -> list[StoredBlock]:
        """The batch's blocks that are in the log, each with its batch time in the ledger."""
        if not is_over and self._is_gone(manifest):
            # Cleanup deletes a batch's log only after its result is durable, so somebody else deleted it.
            self.notices.append(
                f"Batch {time_text(manifest.batch_time_ms)} is not over, and its log is gone: it reads Kafka."
            )
        taken = []
        for info in (self.accepted[handle] for handle in manifest.in_log if handle in self.accepted):
            first_ms = first_batch_time(self.stream, info)
            own_ms = min((time_ms for time_ms in absorbed if time_ms >= first_ms), default=manifest.batch_time_ms)
            taken.append(StoredBlock(0, own_ms, self.now_ms, info))
        self.blocks += taken
        return taken


def _left_manifests(
    manifests: Mapping[int, Sequence[FoundManifest]], results: Mapping[int, StoredResult]
) -> dict[int, int]:
    """The times whose manifest counts as that of an allocation that did not get to the ledger, with a later time whose
    manifest lists all its records: most likely that batch absorbed the time."""
    listed: dict[InputPartition, list[tuple[Span, int]]] = defaultdict(list)
    for time_ms, of_time in manifests.items():
        for key, span in {key_and_span for manifest in of_time for key_and_span in manifest.spans}:
            listed[key].append((span, time_ms))
    left: dict[int, int] = {}
    for spans in listed.values():
        reached_until, reached_ms = 0, 0
        for (start, until), time_ms in sorted(spans):
            if start < reached_until:
                earlier_ms, later_ms = sorted((time_ms, reached_ms))
                if earlier_ms not in results and _holds_all(manifests[later_ms], manifests[earlier_ms]):
                    left[earlier_ms] = later_ms
            if until >= reached_until:
                reached_until, reached_ms = until, time_ms
    return left


def _holds_all(later: Sequence[FoundManifest], earlier: Sequence[FoundManifest]) -> bool:
    """Whether each manifest of one time lists all that any of another time lists."""
    return all(
        any(
            other_key == key and other[0] <= span[0] and span[1] <= other[1]
            for other_key, other in other_manifest.spans
        )
        for other_manifest in later
        for manifest in earlier
        for key, span in manifest.spans
    )


def first_batch_time(stream: StreamRow, info: BlockInfo) -> int:
    """The batch time that a block gets if this time is not sealed."""
    event_ms = info.event_time_ms
    cut_ms = info.cut_time_ms if event_ms is None else max(0, min(event_ms, info.cut_time_ms))
    return stream.batch_time_after(cut_ms)
