"""Searches for a key by the API: few at once, and each with an end, since they run in the API server's own threads."""

from __future__ import annotations

import threading

from headrace.errors import HeadraceError
from headrace.stream_context import StreamContext
from headrace.trace.key_search import search_key
from headrace.trace.models import KeySearch

MAX_SEARCHED = 200_000
"""How many records a search looks at: a person waits for the answer. The command searches more."""
SECONDS = 15.0
"""How long a search takes. It ends at the end of a block, and the answer has what was found until then."""
AT_ONCE = 2
"""How many searches run at once: each decompresses and scans blocks as fast as it can."""


class SearchesBusyError(HeadraceError):
    """Too many searches for keys are running."""


class KeySearches:
    """Runs searches in the threads of those who call. Safe across threads."""

    def __init__(self, *, seconds: float = SECONDS, at_once: int = AT_ONCE) -> None:
        self._seconds = seconds
        self._at_once = at_once
        self._slots = threading.BoundedSemaphore(at_once)

    def search(self, context: StreamContext, key: bytes, *, limit: int) -> KeySearch:
        """Search the log for records with the key, newest first.

        Raises:
            SearchesBusyError: as many searches as may run at once are running.
        """
        if not self._slots.acquire(blocking=False):
            raise SearchesBusyError(
                f"As many searches for keys as may run at once in this API server are running: {self._at_once}.",
                remedy=f"Try again: each ends within {self._seconds:g} s. Or run `headrace trace NAME --key KEY`.",
            )
        try:
            return search_key(context, key, limit=limit, max_records=MAX_SEARCHED, max_seconds=self._seconds)
        finally:
            self._slots.release()
