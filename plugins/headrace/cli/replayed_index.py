"""Compares an index that a replay wrote with the batches that the stream's own output has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.states import BatchState

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_BEYOND_MS = 2**62


class AliasSwapRefusedError(HeadraceError):
    """The alias is not moved: the index lacks batches, or there is no such replay, or it wrote another index."""


class ReplayedIndex:
    """The index ``index`` of the replay's copy of ``output``, by the ledger at the time of construction.

    Times are batch times, in epoch milliseconds; ranges include both ends.

    Raises:
        AliasSwapRefusedError: the stream has no such replay.
    """

    def __init__(self, ledger: Ledger, stream: str, output: str, replay: str, index: str) -> None:
        self._output = output
        self._replay = replay
        self._index = index
        rows = ledger.replays.between(stream, replay, 0, _BEYOND_MS)
        if not rows:
            raise AliasSwapRefusedError(
                f"Stream {stream!r} has no replay {replay!r}.", remedy="Give the name that replay_dag was given."
            )
        self.first_ms = rows[0].batch_time_ms
        completed = {row.batch_time_ms for row in rows if row.state is BatchState.COMPLETED}
        indexes = _indexes(ledger, stream, replay, output)
        self._indexes = {batch_time_ms: indexes.get(batch_time_ms) for batch_time_ms in sorted(completed)}
        self._written = ledger.batches.written(stream, output, 0, _BEYOND_MS)
        self._running = [row.batch_time_ms for row in ledger.batches.page(stream, _BEYOND_MS, [BatchState.RUNNING])]

    @property
    def newest_ms(self) -> int:
        """The newest batch time that the stream's output has written; 0 if there is none."""
        return max(self._written, default=0)

    def check(self, from_ms: int, until_ms: int) -> None:
        """Raise AliasSwapRefusedError if the replay wrote batches of the range into another index."""
        for batch_time_ms, index in self._indexes.items():
            if from_ms <= batch_time_ms <= until_ms and index != self._index:
                raise AliasSwapRefusedError(
                    f"Replay {self._replay!r} wrote batch {time_text(batch_time_ms)} of output {self._output!r} into "
                    f"{index!r}, not into {self._index!r}.",
                    remedy="Name the index that the replay writes; another index is another replay.",
                )

    def missing(self, from_ms: int, until_ms: int) -> list[int]:
        """The batches of the range that the output has and the index lacks, and that can be replayed."""
        return [
            batch_time_ms
            for batch_time_ms, state in self._lacking(from_ms, until_ms)
            if state is not BatchState.ABANDONED
        ]

    def abandoned(self, from_ms: int, until_ms: int) -> list[int]:
        """The batches of the range that the output has and the index will never have: they were abandoned since."""
        return [
            batch_time_ms for batch_time_ms, state in self._lacking(from_ms, until_ms) if state is BatchState.ABANDONED
        ]

    def to_run_again(self, from_ms: int, after_ms: int) -> list[int]:
        """The batches that must be written again after the alias is moved.

        These are the batches after ``after_ms`` that the output has and the index lacks, and the batches from
        ``from_ms`` on that are being written now, because it is not known into which index.
        """
        running = [batch_time_ms for batch_time_ms in self._running if batch_time_ms >= from_ms]
        return sorted({*self.missing(after_ms + 1, _BEYOND_MS), *running})

    def _lacking(self, from_ms: int, until_ms: int) -> list[tuple[int, BatchState]]:
        return [
            (batch_time_ms, state)
            for batch_time_ms, state in self._written.items()
            if from_ms <= batch_time_ms <= until_ms and self._indexes.get(batch_time_ms) != self._index
        ]


def _indexes(ledger: Ledger, stream: str, replay: str, output: str) -> dict[int, str | None]:
    """The index that the replay wrote last, by batch time."""
    from headrace.stream import Stream

    by_definition: dict[str, str | None] = {}
    found = {}
    for batch_time_ms, definition in ledger.replays.written_by(stream, replay, output, 0, _BEYOND_MS).items():
        if definition not in by_definition:
            outputs = Stream.from_json(definition).outputs
            by_definition[definition] = next(
                (getattr(each, "index", None) for each in outputs if each.id == output), None
            )
        found[batch_time_ms] = by_definition[definition]
    return found
