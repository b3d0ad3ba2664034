"""Loads a stream's listeners: those of its definition, and those that installed packages offer to all streams.

It imports no ledger: `headrace streams check` loads listeners too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from headrace.listeners.listener import StreamListener
from headrace.stream import Listener, Stream
from headrace.stream.model import StreamDefinitionError, load_reference

logger = logging.getLogger(__name__)

GROUP = "headrace.listeners"
"""The entry point group: its names are the listeners' names, its values classes without arguments, or instances."""


def load_listeners(stream: Stream) -> tuple[dict[str, StreamListener], dict[str, str]]:
    """Return the listeners by name, and the errors of those that cannot be made, which are logged.

    A listener of the definition replaces one of an installed package with the same name.
    """
    listeners: dict[str, StreamListener] = {}
    problems: dict[str, str] = {}
    for name, make in _factories(stream):
        if name in listeners or name in problems:
            continue
        try:
            listeners[name] = make()
        except BaseException as error:
            # A module may call sys.exit when it is imported.
            problems[name] = f"{type(error).__name__}: {error}"
            logger.error("Listener %s is left out: %s", name, problems[name])
    return listeners, problems


def make_listener(listener: Listener) -> StreamListener:
    """Import the listener's class and call it.

    Raises:
        StreamDefinitionError: it cannot be imported, is no `StreamListener`, or cannot be called with its arguments.
    """
    loaded = load_reference(listener.reference, "listener")
    arguments: dict[str, object] = dict(listener.keywords)
    if isinstance(loaded, StreamListener) and arguments:
        raise StreamDefinitionError(
            f"The listener {listener.id} is an instance, so it takes no {', '.join(arguments)}.",
            remedy="Name its class, or leave them out.",
        )
    return _instance(loaded, listener.id, arguments)


def check_listeners(stream: Stream) -> None:
    """Make the listeners of the definition, to find out whether the receiver job can.

    Raises:
        StreamDefinitionError: see `make_listener`.
    """
    for listener in stream.listeners:
        make_listener(listener)


def _factories(stream: Stream) -> Iterator[tuple[str, Callable[[], StreamListener]]]:
    for listener in stream.listeners:
        yield listener.id, partial(make_listener, listener)
    for point in entry_points(group=GROUP):
        yield point.name, partial(_load, point)


def _load(point: EntryPoint) -> StreamListener:
    return _instance(point.load(), point.name, {})


def _instance(loaded: object, name: str, arguments: dict[str, object]) -> StreamListener:
    if isinstance(loaded, StreamListener):
        return loaded
    if not (isinstance(loaded, type) and issubclass(loaded, StreamListener)):
        raise StreamDefinitionError(
            f"The listener {name} is no class derived from headrace.listeners.StreamListener, and no instance of one."
        )
    try:
        return loaded(**arguments)
    except Exception as error:
        raise StreamDefinitionError(
            f"The listener {name} cannot be made: {loaded.__name__}({', '.join(arguments)}) raises "
            f"{type(error).__name__}: {error}.",
            remedy="Correct its arguments.",
        ) from error
