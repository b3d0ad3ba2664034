"""A stream with a ledger, a job and a receiver, as for the ledger's tests, and listeners that note what they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ledger.conftest import *  # noqa: F403
from tests.unit.ledger.conftest import World

from headrace.listeners import StreamEvent, StreamListener
from headrace.listeners.bus import METHODS, ListenerBus
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

WAIT_SECONDS = 60.0


class Recorder(StreamListener):
    """Notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.contexts: list[StreamContext] = []
        self.closed = 0

    def start(self, context: StreamContext) -> None:
        self.contexts.append(context)

    def close(self) -> None:
        self.closed += 1

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    @property
    def events(self) -> list[StreamEvent]:
        return [event for _, event in self.calls]

    @property
    def ids(self) -> list[int]:
        return [event.event_id for event in self.events]


def _noting(method: str) -> Callable[[Recorder, StreamEvent], None]:
    return lambda self, event: self.calls.append((method, event))


for _method in METHODS:
    setattr(Recorder, _method, _noting(_method))


class GapRecorder(StreamListener):
    """Notes gaps, and runs ``then`` with each."""

    def __init__(self, then: Callable[[int], object] = lambda _: None) -> None:
        self.offsets: list[int] = []
        self.ids: list[int] = []
        self.then = then

    def on_gap(self, event: Any) -> None:
        self.offsets.append(event.from_offset)
        self.ids.append(event.event_id)
        self.then(event.from_offset)


@pytest.fixture
def world(request: pytest.FixtureRequest, build: Callable[..., World]) -> World:
    """The stream; a test may give options of its registration."""
    return build(**getattr(request, "param", {}))


@pytest.fixture
def context(world: World, tmp_path: Path) -> StreamContext:
    stream = Stream(
        name="flights",
        inputs=KafkaInput(id="kafka", bootstrap_servers="localhost:9", topics="departures"),
        outputs=ConsoleOutput(),
        batch_interval="1 s",
        storage=str(tmp_path),
        ledger=world.ledger.url,
    )
    return StreamContext(stream, world.ledger)


@pytest.fixture
def start(context: StreamContext, world: World) -> Iterator[Callable[..., ListenerBus]]:
    """Starts a bus with listeners by name, and stops it at the end."""
    buses: list[ListenerBus] = []

    def start(*, lease: Any = None, **options: Any) -> ListenerBus:
        listeners = {name: each for name, each in options.items() if isinstance(each, StreamListener)}
        settings = {"poll_seconds": 0.01, "save_seconds": 0.0}
        settings |= {name: value for name, value in options.items() if name not in listeners}
        bus = ListenerBus(context, lease or world.job, listeners, **settings)
        bus.start()
        buses.append(bus)
        return bus

    yield start
    for bus in buses:
        bus.stop(0.0)


def gaps(world: World, *offsets: int) -> None:
    """Advance the first partition over a gap at each of these offsets, which ascend one by one."""
    for offset in offsets:
        world.ledger.positions.advance(world.receiver, world.partitions[0], offset, offset + 1, gap="lost")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging listener waits for; set at the end, so that its thread ends."""
    gate = threading.Event()
    yield gate
    gate.set()
