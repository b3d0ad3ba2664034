"""The errors of the demo itself."""

from __future__ import annotations

from headrace.errors import HeadraceError


class DemoError(HeadraceError):
    """The demo cannot go on."""


class FlightsNotFoundError(DemoError):
    """The flights' data is not installed."""


class NotAnsweringError(DemoError):
    """A server does not answer now; a retry may succeed."""
