"""A DAG run that processes a batch, as its tasks see it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Self

from headrace.runs.batch_time import batch_time_of_run, begin_run
from headrace.runs.identity import is_automatic
from headrace.runs.request import RunRequest, run_request

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


class BatchRun:
    """A DAG run and its batch time, with the stream and its ledger open.

    Args:
        context: Airflow's context of the task.
        stream_context: the stream, registered in its ledger.
        batch_time_ms: the batch time that the run processes.
    """

    def __init__(self, context: Context, stream_context: StreamContext, batch_time_ms: int) -> None:
        self.context = context
        self.stream_context = stream_context
        self.batch_time_ms = batch_time_ms

    @classmethod
    def of(cls, context: Context, stream_context: StreamContext) -> Self:
        """The run of the task. Raises what `batch_time_of_run` raises."""
        return cls(context, stream_context, batch_time_of_run(context, stream_context))

    @classmethod
    def begin(cls, context: Context, stream_context: StreamContext) -> Self:
        """The run of its first task. Raises what `begin_run` raises."""
        return cls(context, stream_context, begin_run(context, stream_context))

    @property
    def stream(self) -> Stream:
        """The definition that the task runs with."""
        return self.stream_context.stream

    @property
    def ledger(self) -> Ledger:
        """The stream's ledger, open."""
        return self.stream_context.ledger

    @cached_property
    def request(self) -> RunRequest:
        """What the run asks for. Raises what `run_request` raises."""
        return run_request(self.context, self.stream)

    @property
    def is_automatic(self) -> bool:
        """Whether other runs follow without a request, and continue where this one ends."""
        return is_automatic(self.context)

    def find_batch(self) -> BatchRow | None:
        """The batch, or None if it is not allocated."""
        return self.ledger.batches.find(self.stream.name, self.batch_time_ms)
