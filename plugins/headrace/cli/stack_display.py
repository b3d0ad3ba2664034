"""Shows the state of the embedded stack on a console."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from headrace.devstack.state import Phase, StackState

_STYLES = {Phase.RUNNING: "green", Phase.FAILED: "red", Phase.STARTING: "yellow", Phase.STOPPING: "yellow"}


def stack_table(state: StackState) -> Table:
    """A table with one row for each server: phase, address, seconds to start."""
    table = Table("server", "state", Column("address", overflow="fold"), "started in", box=None, pad_edge=False)
    for service in state.services.values():
        seconds = "" if service.seconds_to_start is None else f"{service.seconds_to_start:.1f} s"
        style = _STYLES.get(service.phase)
        table.add_row(
            service.name, f"[{style}]{service.phase}[/]" if style else service.phase, service.address, seconds
        )
    return table


def login_line(state: StackState, *, with_password: bool) -> str | None:
    """How to log in to Airflow: user, and password or path of its file. None if the stack or Airflow does not run."""
    if state.login is None or state.phase is not Phase.RUNNING:
        return None
    if with_password:
        try:
            password = json.loads(Path(state.login.password_file).read_text())[state.login.user]
        except (OSError, ValueError, KeyError):
            pass  # This user cannot read it: name the file instead.
        else:
            return f"Airflow: user {state.login.user}, password {password}"
    return f"Airflow: user {state.login.user}, password in {state.login.password_file}"


class Progress:
    """Shows a stack's progress on standard error: a live table on a terminal, otherwise one line for each change."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._reported: dict[str, Phase] = {}
        self._closed = False

    def show(self, state: StackState) -> None:
        """Show ``state``; does nothing after `close`."""
        if self._closed:
            return
        if self._live is not None:
            self._live.update(stack_table(state))
            return
        for service in state.services.values():
            if self._reported.get(service.name) is not service.phase:
                self._reported[service.name] = service.phase
                self._console.print(f"{service.name}: {service.phase}", highlight=False)

    def close(self) -> None:
        """Stop the live table."""
        if not self._closed and self._live is not None:
            self._live.stop()
        self._closed = True

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
