"""The receivers of the package under the real tracker, in processes that are killed with kill -9."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.receiver.launchers import ProcessLauncher, ThreadLauncher

from headrace.ledger import Ledger, ReceiverState
from headrace.receiver.tracker import ReceiverTracker, TrackerReport
from headrace.stream import ConsoleOutput, ReceiverInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.reader import read_block


class CustomStream:
    """A stream over one custom input, with its tracker in a thread."""

    def __init__(self, folder: Path, source: ReceiverInput, launcher: Any) -> None:
        self.stream = Stream(
            name="text",
            inputs=source,
            outputs=ConsoleOutput(id="console"),
            batch_interval="1 s",
            block_interval="50 ms",
            storage=str(folder / "storage"),
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.ledger = Ledger.open(self.stream.ledger)
        self.context = StreamContext(self.stream, self.ledger)
        self.ledger.streams.register("text", self.stream.to_json(), batch_interval_ms=1_000, block_interval_ms=50)
        self.launcher = launcher
        self.stop = threading.Event()
        self.reports: list[TrackerReport] = []
        self._thread = threading.Thread(target=self._track)
        self._thread.start()

    def _track(self) -> None:
        lease = self.ledger.jobs.acquire("text", holder="test", lease_ms=60_000)
        tracker = ReceiverTracker(self.context, self.launcher, lease, receiver_lease_ms=4_000, restart_seconds=0.1)
        self.reports.append(tracker.run(self.stop))

    def end(self) -> None:
        self.stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def rows(self) -> list[dict[str, Any]]:
        """Every accepted record, in the order of partition and offset."""
        found = []
        for each in self.ledger.blocks.unclaimed("text"):
            for block in self.ledger.allocations.blocks_of("text", each.batch_time_ms):
                block_records = read_block(self.context.storage.below("log"), block.info.handle)[1]
                found += block_records.drop_columns(["timestamp"]).to_pylist()
        return sorted(found, key=lambda row: (row["partition"], row["offset"]))

    def records(self) -> int:
        return sum(row.received_records for row in self.ledger.positions.all("text"))

    def wait(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not condition():
            rows = [(row.state, row.last_error) for row in self.ledger.receivers.all("text")]
            assert time.monotonic() < until, f"not in time; the receivers: {rows}"
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., CustomStream]]:
    running: list[CustomStream] = []

    def start(source: ReceiverInput, launcher: Any) -> CustomStream:
        running.append(CustomStream(tmp_path, source, launcher))
        return running[-1]

    yield start
    for each in running:
        each.end()
        each.ledger.close()


class Growing:
    """Files that grow in a thread, by half lines too, as a program writes them."""

    def __init__(self, folder: Path, files: int) -> None:
        self._paths = [folder / f"part-{number}.log" for number in range(files)]
        self._stop = threading.Event()
        self.lines: Counter[tuple[str, str]] = Counter()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._stop.is_set():
            for path in self._paths:
                with path.open("a") as file:
                    for _ in range(5):
                        line = f"line {number} of {path.name} äöü"
                        file.write(line[:7])
                        file.flush()
                        file.write(f"{line[7:]}\n")
                        self.lines[path.name, line] += 1
                        number += 1
            self._stop.wait(0.05)

    def end(self) -> int:
        """Returns the number of lines."""
        self._stop.set()
        self._thread.join(30)
        return len(self.lines)


@pytest.mark.slow
def test_growing_files_are_in_the_log_once_though_receivers_die(
    run: Callable[..., CustomStream], tmp_path: Path
) -> None:
    """The receivers of the directory are killed while its files grow."""
    folder = tmp_path / "lines"
    folder.mkdir()
    launcher = ProcessLauncher()
    files = Growing(folder, files=6)
    try:
        source = ReceiverInput(
            id="lines",
            receiver="headrace.receiver:TextFiles",
            arguments={"directory": str(folder), "pattern": "*.log", "look_seconds": 0.02},
            receivers=2,
        )
        running = run(source, launcher)
        killed = 0
        while killed < 4:
            before = running.records()
            running.wait(lambda before=before: running.records() > before + 200)  # type: ignore[misc]
            living = [handle.process for handle in launcher.handles if handle.process.is_alive()]
            victim = living[killed % len(living)]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(30)
            killed += 1
    finally:
        written = files.end()
    running.wait(lambda: running.records() >= written)
    running.wait(lambda: len(launcher.handles) >= 2 + killed)
    # A line too many would come now.
    running.end()
    rows = running.rows()
    assert Counter((row["key"].decode(), row["value"].decode()) for row in rows) == files.lines
    for partition in (0, 1):
        offsets = [row["offset"] for row in rows if row["partition"] == partition]
        assert offsets == list(range(len(offsets)))
        # In each file the lines keep their order.
        for name in {row["key"] for row in rows}:
            begins = [
                int(row["headers"][0]["value"]) for row in rows if (row["partition"], row["key"]) == (partition, name)
            ]
            assert begins == sorted(begins)


class TextServer:
    """Sends lines to each client that connects, as ``nc -lk``; one client at a time."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.clients: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self.clients.append(self._server.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._server.close()


@pytest.fixture
def server() -> Iterator[TextServer]:
    made = TextServer()
    yield made
    made.close()


def test_socket_lines_are_stored_and_a_lost_connection_is_remade(
    run: Callable[..., CustomStream], server: TextServer
) -> None:
    source = ReceiverInput(
        id="lines", receiver="headrace.receiver:SocketText", arguments={"host": "127.0.0.1", "port": server.port}
    )
    running = run(source, ThreadLauncher())
    running.wait(lambda: len(server.clients) == 1)
    server.clients[0].sendall(b"to be\r\nor n")
    running.wait(lambda: running.records() == 1)
    server.clients[0].sendall(b"ot\n")
    running.wait(lambda: running.records() == 2)
    server.clients[0].sendall(b"the end")
    server.clients[0].close()
    running.wait(lambda: len(server.clients) == 2)
    server.clients[1].sendall(b"that is\n")
    running.wait(lambda: running.records() == 4)
    errors = [event.payload.get("error") for event in running.ledger.events.page("text")]
    assert "The server has closed the connection" in errors
    running.end()
    assert [row["value"] for row in running.rows()] == [b"to be", b"or not", b"the end", b"that is"]
    (row,) = running.ledger.receivers.all("text")
    assert row.state is ReceiverState.STOPPED
