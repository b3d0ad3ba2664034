"""The versions that both ends of a Spark Connect session must share.

Functions travel between them by cloudpickle, which holds between equal Pythons only.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping

from headrace import __version__
from headrace.errors import HeadraceError

REPLACED_BY = "replaced_by"
"""The attribute of a receiver job that was asked to stop for a newer version: that version."""


class VersionMismatchError(HeadraceError):
    """The receiver job runs with other versions than the batch that wants to use its application."""


def current_versions() -> dict[str, str]:
    """The versions of this process, as a lease records them: Python (major.minor), pyspark, headrace."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyspark": _pyspark_version(),
        "headrace": __version__,
    }


def _pyspark_version() -> str:
    # A task of Airflow's has not imported pyspark, which would cost it half a second and more.
    if "pyspark" not in sys.modules:
        try:
            return importlib.metadata.version("pyspark")
        except importlib.metadata.PackageNotFoundError:
            # As with a SPARK_HOME, whose folder is on the path without having been installed.
            pass
    from pyspark.version import __version__ as version

    return str(version)


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What differs, in words: ``headrace 0.1.0 there, 0.2.0 here``."""
    return [
        f"{name} {theirs.get(name, 'unknown')} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]


def check_versions(theirs: Mapping[str, str], ours: Mapping[str, str] | None = None) -> None:
    """Refuse a receiver job whose versions differ from ours; raises VersionMismatchError naming each difference."""
    different = differences(theirs, current_versions() if ours is None else ours)
    if different:
        raise VersionMismatchError(
            f"The receiver job runs with other versions: {'; '.join(different)}.",
            remedy="Restart the receiver job with this environment, or run the batches with way 'submit'.",
        )
