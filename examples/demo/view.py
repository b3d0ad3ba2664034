"""Shows the demo's progress: a live display on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from examples.demo.observing import Snapshot
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.devstack.state import Phase, StackState

# Without a terminal, the least number of seconds between two progress lines.
_EVERY_SECONDS = 5.0
_MARKS = {Phase.RUNNING: ("✓", "green"), Phase.FAILED: ("✗", "red")}


class View(ABC):
    """Shows the demo's progress while its context is entered."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line that stays."""

    @abstractmethod
    def stack(self, state: StackState) -> None:
        """Show the servers' states during the start."""

    @abstractmethod
    def stream(self, snapshot: Snapshot) -> None:
        """Show the stream's progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


def make_view(console: Console) -> View:
    """The view that suits the console."""
    return LiveView(console) if console.is_terminal else LinesView(console)


class LinesView(View):
    """A line for each event, and one every few seconds in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._reported: dict[str, Phase] = {}
        self._shown: str | None = None
        self._shown_at = float("-inf")

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(f"{seconds:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def stack(self, state: StackState) -> None:
        for service in state.services.values():
            if service.phase in (Phase.RUNNING, Phase.FAILED) and self._reported.get(service.name) is not service.phase:
                self._reported[service.name] = service.phase
                self.say(f"{service.name} is {service.phase}")

    def stream(self, snapshot: Snapshot) -> None:
        text = one_line(snapshot)
        if text != self._shown and time.monotonic() - self._shown_at >= _EVERY_SECONDS:
            self._shown, self._shown_at = text, time.monotonic()
            self.say(text)


class LiveView(View):
    """Updates servers and bars in place, and prints lines above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(Text.assemble((f"{seconds:6.1f} s  ", "dim"), text))

    def stack(self, state: StackState) -> None:
        line = Text("          ")
        for service in state.services.values():
            mark, style = _MARKS.get(service.phase, ("…", "yellow"))
            line.append(f"{mark} {service.name}  ", style=style)
        self._live.update(line)

    def stream(self, snapshot: Snapshot) -> None:
        self._live.update(bars(snapshot))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update("")
        self._live.stop()


def one_line(snapshot: Snapshot) -> str:
    """A snapshot as one line of text."""
    parts = [
        f"produced {snapshot.produced:,}",
        f"received {snapshot.received:,} (receiver job {snapshot.receiving})",
        f"indexed {snapshot.indexed:,}",
        f"dead-lettered {snapshot.dead_lettered:,}",
        f"batches: {batches(snapshot)}",
    ]
    return ", ".join(parts) + (f"; last error: {snapshot.error}" if snapshot.error else "")


def bars(snapshot: Snapshot) -> RenderableType:
    """A snapshot as bars."""
    table = Table.grid(padding=(0, 2))
    rows = [
        ("produced", snapshot.produced, "in Kafka"),
        ("received", snapshot.received, f"in the log, job {snapshot.receiving}"),
        ("indexed", snapshot.indexed, "in Elasticsearch"),
    ]
    for name, count, where in rows:
        bar = ProgressBar(total=max(snapshot.to_produce, 1), completed=count, width=24)
        table.add_row(Text(f"{name:>12}"), bar, Text(f"{count:>9,}"), Text(where, style="dim"))
    table.add_row(Text("dead letters"), "", Text(f"{snapshot.dead_lettered:>9,}"), "")
    table.add_row(Text("     batches"), "", "", Text(batches(snapshot)))
    return Group(table, Text(snapshot.error, style="red")) if snapshot.error else table


def batches(snapshot: Snapshot) -> str:
    """The numbers of batches with records, by state, as text."""
    if not snapshot.with_records:
        return "none yet"
    states = [f"{count} {state}" for state, count in snapshot.states.items()]
    return ", ".join(states) + f", {snapshot.cleaned} cleaned up"
