"""Thread pools in which an event loop runs a ledger's blocking calls: a few threads for each ledger.

A call to a database that hangs holds its thread for half a minute. In asyncio's own pool such calls would block all
other users of the pool, and other ledgers. Here a ledger has at most ``THREADS`` threads; calls queued behind them have
not begun, and are cancelled with the task that made them.
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
"""Threads for each ledger and process. A call takes a millisecond, so this is enough for a thousand triggers."""

P = ParamSpec("P")
T = TypeVar("T")

_pools: dict[str, ThreadPoolExecutor] = {}
_making = threading.Lock()
# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pools.clear)


async def in_thread(ledger: str, call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but in a thread of the pool of the ledger with this URL, which ``call`` blocks on."""
    context = contextvars.copy_context()
    run = partial(context.run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_pool(ledger), run)


def _pool(ledger: str) -> ThreadPoolExecutor:
    with _making:
        pool = _pools.get(ledger)
        if pool is None:
            pool = _pools[ledger] = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-ledger")
        return pool
