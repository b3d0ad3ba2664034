"""The errors of the embedded stack of servers."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import HeadraceError


class LocalStackError(HeadraceError):
    """The base class of the embedded stack's errors."""


class JavaMissingError(LocalStackError):
    """No Java, or one that is too old."""


class JarsError(LocalStackError):
    """Jars could not be fetched, or differ from the lock file."""


class UnsupportedPlatformError(LocalStackError):
    """No binaries are published for this operating system and processor."""


class ServerDiedError(LocalStackError):
    """A server ended while it was needed; the text has the last lines of its log."""

    def __init__(self, name: str, exit_text: str, log: Path, tail: str) -> None:
        super().__init__(
            f"{name} {exit_text}. The last lines of {log}:\n{tail or '(the log is empty)'}",
        )
        self.name = name


class ServerNotReadyError(LocalStackError):
    """A server runs but did not answer in time; the text has the last lines of its log."""

    def __init__(self, name: str, seconds: float, last_answer: str, log: Path, tail: str) -> None:
        super().__init__(
            f"{name} did not answer within {seconds:.0f} s (last try: {last_answer or 'none'}). "
            f"The last lines of {log}:\n{tail or '(the log is empty)'}",
        )
        self.name = name


class StackRunningError(LocalStackError):
    """Another process already runs, starts or stops the stack of this data folder."""
