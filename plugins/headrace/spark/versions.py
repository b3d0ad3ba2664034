"""The versions that both ends of a Spark Connect session must share.

Functions travel between them by cloudpickle, which holds between equal Pythons only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from headrace import __version__
from headrace.errors import HeadraceError


class VersionMismatchError(HeadraceError):
    """The receiver job runs with other versions than the batch that wants to use its application."""


def current_versions() -> dict[str, str]:
    """The versions of this process, as a lease records them: Python (major.minor), pyspark, headrace."""
    from pyspark.version import __version__ as pyspark_version

    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyspark": pyspark_version,
        "headrace": __version__,
    }


def check_versions(theirs: Mapping[str, str], ours: Mapping[str, str] | None = None) -> None:
    """Refuse a receiver job whose versions differ from ours; raises VersionMismatchError naming each difference."""
    ours = current_versions() if ours is None else ours
    different = [
        f"{name} {theirs.get(name, 'unknown')} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]
    if different:
        raise VersionMismatchError(
            f"The receiver job runs with other versions: {'; '.join(different)}.",
            remedy="Restart the receiver job with this environment, or run the batches with way 'submit'.",
        )
