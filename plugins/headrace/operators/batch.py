"""Base classes of the operators that run a batch's steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from headrace.hooks.ledger import LedgerHook, register
from headrace.runs.batch_time import batch_time_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.wal.storage import LogStorage


class BatchStep:
    """The batch time of a run, and the ledger and storage of its stream. Mixed into operators."""

    stream: Stream
    revision: int | None = None
    """The ledger's revision number of the stream's definition; None until the ledger is open."""

    def batch_time_ms(self, context: Context, ledger: Ledger) -> int:
        """This run's batch time, in milliseconds since the epoch."""
        return batch_time_of_run(context, self.stream, ledger)

    @contextmanager
    def opened(self) -> Iterator[tuple[Ledger, LogStorage]]:
        """Register the stream in the ledger; yield the ledger and the stream's storage."""
        from headrace.wal.storage import open_storage

        with LedgerHook(self.stream.ledger).opened() as ledger:
            self.revision = register(ledger, self.stream)
            yield ledger, open_storage(self.stream.storage.url)


class BatchStepOperator(BatchStep, BaseOperator):
    """A step that needs only its stream.

    :param stream: the stream.
    """

    template_fields: Sequence[str] = ()

    def __init__(self, *, stream: Stream, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = stream
