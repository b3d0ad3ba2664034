"""Runs the second example, Spark's quick example: a TCP server sends lines, each batch prints its word counts."""

from __future__ import annotations

import ast
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from examples.demo.errors import DemoError
from examples.demo.following import explain, follow, unpause
from examples.demo.observing import Observer

if TYPE_CHECKING:
    from examples.demo.stack import DemoStack
    from examples.demo.view import View
    from rich.console import Console

STREAM = "word_count"

# They have at most as many different words as the stream prints rows.
LINES = (
    "row row row your boat",
    "gently down the stream",
    "merrily merrily merrily merrily",
    "life is but a dream",
)
_VERSES = 100
_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 300.0

_PRINTED = re.compile(r"Time: (\d+) ms")
_ROW = re.compile(r"\('\w+', \d+\)")


@dataclass(frozen=True, slots=True)
class WordCounts:
    """The words that were sent, and each batch's counts by batch time in milliseconds."""

    sent: Counter[str]
    printed: dict[int, Counter[str]]

    @property
    def counted(self) -> Counter[str]:
        """The counts of all batches together."""
        return sum(self.printed.values(), Counter())

    @property
    def holds(self) -> bool:
        """Whether the batches together counted every word that was sent."""
        return bool(self.sent) and self.counted == self.sent

    def to_dict(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "holds": self.holds,
            "sent": dict(self.sent),
            "counted": dict(self.counted),
            "batches": [{"batch_time_ms": at, "counts": dict(counts)} for at, counts in sorted(self.printed.items())],
        }

    def print(self, console: Console) -> None:
        """Print the result for people."""
        words, batches = self.sent.total(), sum(1 for counts in self.printed.values() if counts)
        if self.holds:
            console.print(f"[bold green]Proved:[/] {batches} batches counted each of {words:,} words once.")
        else:
            console.print(
                f"[bold red]The counts are wrong:[/] {dict(self.sent)} were sent, {dict(self.counted)} counted."
            )


class LineServer:
    """Sends lines to the client that connected last, as a person does with ``nc -lk``. Listens on the loopback."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._client: socket.socket | None = None
        self.sent = 0
        threading.Thread(target=self._accept, name="headrace-lines", daemon=True).start()

    @property
    def address(self) -> str:
        """Host and port, as ``host:port``."""
        host, port = self._server.getsockname()
        return f"{host}:{port}"

    def start(self, lines: list[str], rate: float | None) -> None:
        """Send these lines from a thread, ``rate`` a second (None: as fast as possible)."""
        threading.Thread(target=self._send, args=(lines, rate), name="headrace-lines", daemon=True).start()

    def close(self) -> None:
        """End the connection and stop listening."""
        self._server.close()
        if self._client is not None:
            self._client.close()

    def _accept(self) -> None:
        while True:
            try:
                self._client, _ = self._server.accept()
            except OSError:
                return

    def _send(self, lines: list[str], rate: float | None) -> None:
        for line in lines:
            while self._client is None:
                time.sleep(_POLL_SECONDS)
            try:
                self._client.sendall(f"{line}\n".encode())
            except OSError:
                # Closed. The demo says how many words were counted.
                return
            self.sent += 1
            if rate is not None:
                time.sleep(1 / rate)


def run_word_count(stack: DemoStack, view: View, lines: LineServer, *, rate: float | None) -> WordCounts:
    """Send lines by the server, and show what the batches print until all words are counted.

    Args:
        rate: lines a second; None: as fast as possible.

    Raises:
        DemoError: not all words were counted within five minutes.
    """
    from headrace.ledger import Ledger

    result = WordCounts(Counter(word for _ in range(_VERSES) for line in LINES for word in line.split()), {})
    with Ledger.open(stack.ledger_url) as ledger:
        observer = Observer(STREAM, ledger=ledger, to_produce=_VERSES * len(LINES), produced=lambda: lines.sent)
        unpause(stack, view, f"{STREAM}_receiver")
        follow(stack, view, STREAM, observer, until=lambda snapshot: snapshot.receiving == "running")
    unpause(stack, view, f"{STREAM}_batches")
    speed = "as fast as it goes" if rate is None else f"{rate:g} a second"
    view.say(f"sending {_VERSES * len(LINES)} lines from {lines.address}, {speed}")
    lines.start([*LINES] * _VERSES, rate)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    read: set[str] = set()
    while result.counted.total() < result.sent.total():
        for at, text in _new_prints(stack, read):
            result.printed[at] = parse_counts(text)
            if result.printed[at]:
                view.say("\n" + text)
        if time.monotonic() > deadline:
            raise DemoError(
                f"{result.counted.total()} of {result.sent.total()} words were counted within "
                f"{_TIMEOUT_SECONDS:g} s. {explain(stack, STREAM)}"
            )
        time.sleep(_POLL_SECONDS)
    return result


def parse_counts(text: str) -> Counter[str]:
    """The rows of a printed batch, such as ``('row', 3)``."""
    return Counter(dict(ast.literal_eval(row) for row in _ROW.findall(text)))


def printed_batches(log: str) -> Iterator[tuple[int, str]]:
    """The batch time and text of each batch that console outputs printed into a task's log."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        found = _PRINTED.search(line)
        if found is None:
            continue
        rows = []
        for row in lines[number + 2 :]:
            if not _ROW.search(row):
                break
            rows.append(_ROW.findall(row)[0])
        yield int(found[1]), "\n".join(["-" * 43, found[0], "-" * 43, *rows])


def _new_prints(stack: DemoStack, read: set[str]) -> Iterator[tuple[int, str]]:
    """The batches printed by runs that are not in ``read``, oldest first. Adds the runs' ids to ``read``."""
    api, dag_id = stack.airflow(), f"{STREAM}_batches"
    for run in reversed(api.runs(dag_id)):
        run_id = run["dag_run_id"]
        if run_id in read:
            continue
        for task in api.task_instances(dag_id, run_id):
            if task["task_id"].startswith("generate_batch.") and task["state"] == "success":
                read.add(run_id)
                log = api.task_log(dag_id, run_id, task["task_id"], try_number=task["try_number"])
                yield from printed_batches(log)
