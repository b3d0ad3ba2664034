"""Base classes of the operators that run a batch's steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from headrace.hooks.ledger import LedgerHook, register
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.stream import Stream


class BatchStep:
    """Opens a stream for a task. Mixed into operators."""

    stream: Stream
    revision: int | None = None
    """The ledger's revision number of the stream's definition; None until the stream is open."""

    @contextmanager
    def opened(self) -> Iterator[StreamContext]:
        """The stream, registered in its ledger, for the length of a ``with`` block."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            self.revision = register(ledger, self.stream)
            yield StreamContext(self.stream, ledger)


class BatchStepOperator(BatchStep, BaseOperator):
    """A step that needs only its stream.

    :param stream: the stream.
    """

    template_fields: Sequence[str] = ()

    def __init__(self, *, stream: Stream, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = stream
