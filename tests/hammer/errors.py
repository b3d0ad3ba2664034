"""The errors of the hammer itself, as opposed to the problems that it finds."""

from __future__ import annotations

from headrace.errors import HeadraceError


class HammerError(HeadraceError):
    """The hammer cannot go on."""


class SmallDiskError(HammerError):
    """A small file system cannot be made here, so a full disk cannot be tested."""


class TargetMissedError(HammerError):
    """A fault found no target, or had no effect on its target."""
