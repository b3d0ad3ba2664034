"""What a running stream consists of: its definition, its ledger, its storage and its clock, in one value.

Operators, commands and jobs open a `StreamContext` once and pass it on. A function that needs only the ledger and the
stream's name still takes these two.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from headrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.stream_folder import StreamFolder
    from headrace.wal.log_storage import LogStorage


class StreamContext:
    """A stream that a process works on. It does not own the ledger: the code that opened the ledger closes it.

    Args:
        stream: the definition to work with. For an attempt at a batch, this is the definition that the attempt began
            with.
        ledger: the stream's ledger, open.
        storage: the stream's folder in its storage. By default it is opened from ``stream.folder_url`` at first use.
        clock: times loops, and estimates the ledger's clock. Batch times come from the ledger's clock.
    """

    def __init__(
        self, stream: Stream, ledger: Ledger, *, storage: LogStorage | None = None, clock: Clock | None = None
    ) -> None:
        self.stream = stream
        self.ledger = ledger
        self.clock = clock or SystemClock()
        self._opened = storage

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.stream.name

    @cached_property
    def storage(self) -> StreamFolder:
        """The stream's folder in its storage: log, manifests, checkpoints and state. It takes no writes for a ledger
        that is behind it.

        Raises:
            UnknownStorageError: no driver for the URL's scheme can create objects conditionally.
        """
        from headrace.stream_folder import LedgerMark, StreamFolder
        from headrace.wal.storage import open_storage

        timeout_s = self.stream.limits.store_timeout.total_seconds()
        folder = self._opened or open_storage(self.stream.folder_url, write_timeout_s=timeout_s)
        return StreamFolder(folder, LedgerMark(self.name, self.ledger, folder))
