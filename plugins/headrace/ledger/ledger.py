"""The ledger: the transactional truth about streams, blocks, batches and positions."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from headrace.clock import Clock
from headrace.ledger.batches.allocations import Allocations
from headrace.ledger.batches.attempts import Attempts
from headrace.ledger.batches.batches import Batches
from headrace.ledger.batches.replays import Replays
from headrace.ledger.batches.results import Results
from headrace.ledger.batches.run_batch_times import RunBatchTimes
from headrace.ledger.clock_corrections import ClockCorrections
from headrace.ledger.database import Database, Migration, engine_url, ensure_schema, migrate_schema
from headrace.ledger.engines import open_engine
from headrace.ledger.events import Events, Gaps
from headrace.ledger.overviews import Overviews
from headrace.ledger.rebuild import Rebuild
from headrace.ledger.receiving.blocks import Blocks, Segments
from headrace.ledger.receiving.cleanup import Cleanup, Removal
from headrace.ledger.receiving.jobs import Jobs, ListenerCursors, SharedJobs
from headrace.ledger.receiving.positions import Positions
from headrace.ledger.receiving.receivers import Receivers
from headrace.ledger.snapshots import Snapshots
from headrace.ledger.streams import Streams, Topics
from headrace.ledger.timelines import BatchPages, Samples


class Ledger:
    """The ledger's repositories over one pool of connections. Safe across threads and after a fork; pickled as its URL.

    Every call is one transaction: it is either durable or has no effect. Calls block, so asyncio code must run them in
    a thread.
    """

    def __init__(self, url: str, database: Database) -> None:
        self.url = url
        self._database = database
        self.streams = Streams(database)
        self.jobs = Jobs(database)
        self.shared_jobs = SharedJobs(database)
        self.receivers = Receivers(database)
        self.topics = Topics(database)
        self.positions = Positions(database)
        self.blocks = Blocks(database)
        self.segments = Segments(database)
        self.batches = Batches(database)
        self.batch_pages = BatchPages(database)
        self.allocations = Allocations(database)
        self.attempts = Attempts(database)
        self.replays = Replays(database)
        self.runs = RunBatchTimes(database)
        self.clock_corrections = ClockCorrections(database)
        self.cleanup = Cleanup(database)
        self.results = Results(database)
        self.removal = Removal(database)
        self.rebuild = Rebuild(database)
        self.gaps = Gaps(database)
        self.events = Events(database)
        self.samples = Samples(database)
        self.listener_cursors = ListenerCursors(database)
        self.snapshots = Snapshots(database)
        self.overviews = Overviews(database)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Ledger:
        """Open the ledger; with ``create``, make a new one in an empty database. Opening it again costs one query.

        Args:
            url: `sqlite:////absolute/path.db`, `postgresql+psycopg://user@host/db`, or `connection:<conn_id>`.
            clock: replaces the database's clock, for tests.
            environ: where a connection is looked up; by default this process's environment.

        Raises:
            LedgerUrlError: the URL has none of these forms, or holds a password.
            LedgerUnavailableError: the database does not answer.
            LedgerMissingError: there is none, or it is empty, and ``create`` is false.
            SchemaError: the schema is older (see `migrate`) or newer than this version's.
        """
        engine = open_engine(engine_url(url, environ), create=create)
        database = Database(engine, clock=clock)
        ensure_schema(database, url, create=create)
        return cls(url, database)

    @staticmethod
    def migrate(url: str, *, environ: Mapping[str, str] | None = None) -> Migration:
        """Bring a ledger to this version's schema, or make a new one. No older headrace may be running on it.

        Raises:
            LedgerUrlError, LedgerUnavailableError: as `open`.
            SchemaError: the schema is newer than this version's.
        """
        database = Database(open_engine(engine_url(url, environ), create=True))
        try:
            return migrate_schema(database)
        finally:
            database.dispose()

    def now_ms(self) -> int:
        """Return the ledger's time, in milliseconds since the Unix epoch. Batch times and leases use it."""
        return self._database.now_ms()

    def close(self) -> None:
        """Close the idle connections to this database; a later call opens new ones."""
        self._database.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _reopen, (self.url,)

    def __repr__(self) -> str:
        return f"Ledger({self.url!r})"


def _reopen(url: str) -> Ledger:
    return Ledger.open(url, create=False)
