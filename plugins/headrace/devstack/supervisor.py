"""The process that runs a stack: `python -m headrace.devstack.supervisor`, or `headrace stack up` in the foreground.

SIGTERM, SIGINT and SIGHUP stop the stack; SIGUSR1 restarts its dead servers. If this process is killed, the servers'
guards see their pipes close and end the servers.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.devstack.errors import StackRunningError
from headrace.devstack.stack import Stack, StackOptions
from headrace.devstack.state import StackState, end_stack_processes, exclusive, read_state
from headrace.errors import HeadraceError

LOCK_FILE = "lock"
RESTART_SIGNAL = signal.SIGUSR1


def supervise(options: StackOptions, on_change: Callable[[StackState], None] = lambda _state: None) -> StackState:
    """Start the stack and run it until a stop is requested. Returns its last state.

    Call it in the main thread, because it handles signals. Raises StackRunningError if the data folder's stack already
    has a supervisor, and the error of a server that could not be started.
    """
    stop, restart = threading.Event(), threading.Event()
    with _held(options.data), _signals(stop, restart):
        before = read_state(options.data)
        if before is not None:
            end_stack_processes(before.id, before.recorded_processes())
        stack = Stack(options, on_change)
        # Signal handlers run in the main thread, which waits in `start`, so another thread reacts to the request.
        threading.Thread(target=_stop_when, args=(stop, stack), name="stop", daemon=True).start()
        try:
            stack.start()
            stack.watch(restart)
        except HeadraceError:
            if not stop.is_set():
                raise
        finally:
            failed = stack.state.error
            if failed is None or stop.is_set():
                stack.stop()
            end_stack_processes(stack.state.id, stack.state.recorded_processes())
        return stack.state


def _stop_when(stop: threading.Event, stack: Stack) -> None:
    stop.wait()
    stack.interrupt()


@contextlib.contextmanager
def _held(data: Path) -> Iterator[None]:
    """Lock the data folder, so that a stack has one supervisor."""
    data.mkdir(parents=True, exist_ok=True)
    ignored = data / ".gitignore"
    if not ignored.exists():
        ignored.write_text("*\n")
    with contextlib.ExitStack() as holding:
        try:
            holding.enter_context(exclusive(data / LOCK_FILE, wait=False))
        except BlockingIOError as error:
            raise StackRunningError(
                f"Another process holds the stack in {data}.",
                remedy="`headrace stack status` shows it, `headrace stack down` stops it.",
            ) from error
        yield


@contextlib.contextmanager
def _signals(stop: threading.Event, restart: threading.Event) -> Iterator[None]:
    handlers = {
        signal.SIGINT: lambda *_: stop.set(),
        signal.SIGTERM: lambda *_: stop.set(),
        signal.SIGHUP: lambda *_: stop.set(),
        RESTART_SIGNAL: lambda *_: restart.set(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Run the detached supervisor; its state file holds its status, its standard error goes to a log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dags", type=Path, required=True)
    parser.add_argument("--plugins", type=Path, required=True)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--registry", action="store_true")
    options = parser.parse_args()
    try:
        supervise(
            StackOptions(options.data, options.dags, options.plugins, tuple(options.without), registry=options.registry)
        )
    except HeadraceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
