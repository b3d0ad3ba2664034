"""The threads in which an event loop lets a ledger's blocking calls wait: a few for each ledger.

A call to a database that hangs holds its thread for half a minute. In asyncio's own pool such calls would take the
threads of all others in the process, and of other ledgers. Here they are at most ``THREADS`` for a ledger; those behind
them have not begun, and go with the task that made them.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

THREADS = 4
"""For each ledger and process. A call takes a millisecond, so this is enough for a thousand triggers."""

P = ParamSpec("P")
T = TypeVar("T")

_pools: dict[str, ThreadPoolExecutor] = {}
_making = threading.Lock()
# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pools.clear)


async def in_thread(ledger: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run ``call``, which blocks on the ledger of this URL, in one of the ledger's threads; as `asyncio.to_thread`."""
    context = contextvars.copy_context()
    run = partial(context.run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_pool(ledger), run)


def _pool(ledger: str) -> ThreadPoolExecutor:
    with _making:
        pool = _pools.get(ledger)
        if pool is None:
            pool = _pools[ledger] = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-ledger")
        return pool
