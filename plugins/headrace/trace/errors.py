"""Errors of tracing."""

from __future__ import annotations

from headrace.errors import HeadraceError


class UnknownRecordError(HeadraceError):
    """The stream has no such topic, partition or document id, so nothing can be said of the record."""
