"""What can go wrong with the hammer itself, as opposed to what it finds."""

from __future__ import annotations

from headrace.errors import HeadraceError


class HammerError(HeadraceError):
    """The hammer cannot go on."""


class SmallDiskError(HammerError):
    """A small file system cannot be made here, so a full disk cannot be tried."""


class TargetMissedError(HammerError):
    """A fault found nothing to hit, or what it hit did not feel it."""
