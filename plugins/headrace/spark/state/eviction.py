"""Finds the batches whose records leave a state's window: they are in the table, but no longer in the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ledger.states import AttemptState
from headrace.spark.state.store import StateStore
from headrace.stream.model import milliseconds
from headrace.stream.state import STATE_STEP

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.models import BatchOrigin
    from headrace.stream import Stream


def evicted_batches(ledger: Ledger, stream: Stream, batch_time_ms: int) -> tuple[BatchOrigin, ...]:
    """The origins of the records that leave the state's window with this batch, oldest first.

    The records of an abandoned batch leave too, if later versions of the table were built on its version.
    """
    times = evicted_batch_times(stream, batch_time_ms)
    if not times:
        return ()
    found = ledger.batches.origins(stream.name, times, abandoned=True)
    abandoned = found.keys() - ledger.batches.origins(stream.name, times).keys()
    return tuple(
        origin
        for time_ms, origin in sorted(found.items())
        if time_ms not in abandoned or _is_in_table(ledger, stream, time_ms, batch_time_ms)
    )


def evicted_batch_times(stream: Stream, batch_time_ms: int) -> list[int]:
    """The batch times whose records leave the state's window with this batch, oldest first; usually one.

    There are several if earlier batch times have no state of their own, for example because they were coalesced. Batch
    times before the first state are not included, because their records are not in the table.
    """
    if stream.state is None or stream.state.window is None:
        return []
    base = StateStore.of(stream).base_of(batch_time_ms)
    if base is None:
        return []
    window, interval = milliseconds(stream.state.window), stream.batch_interval_ms
    last = batch_time_ms - window
    times = range(base.batch_time_ms - window + interval, last + 1, interval)
    return [time for time in times if time >= base.first_ms]


def _is_in_table(ledger: Ledger, stream: Stream, time_ms: int, until_ms: int) -> bool:
    """Whether the table from which the batch ``until_ms`` starts contains the records of the batch ``time_ms``."""
    built_on = StateStore.of(stream).is_built_on(time_ms, until_ms)
    if built_on is not None:
        return built_on
    # The ledger is updated after the version is written, so it lacks attempts that died in between.
    outputs = ledger.attempts.outputs(stream.name, time_ms)
    return any(row.output_id == STATE_STEP and row.state is AttemptState.COMPLETED for row in outputs)
