"""Determines and compares the versions that must be equal at both ends of a Spark Connect session.

Functions are sent between them with cloudpickle, which works only between equal Python versions.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping

from headrace import __version__
from headrace.errors import HeadraceError

REPLACED_BY = "replaced_by"
"""The attribute with the newer version for which a receiver job was asked to stop."""


class VersionMismatchError(HeadraceError):
    """The receiver job runs with other versions than the batch that needs its application."""


def current_versions() -> dict[str, str]:
    """The versions of this process, as a lease records them: Python (major.minor), pyspark, headrace."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "pyspark": _pyspark_version(),
        "headrace": __version__,
    }


def _pyspark_version() -> str:
    # Importing pyspark in an Airflow task would take half a second or more.
    if "pyspark" not in sys.modules:
        try:
            return importlib.metadata.version("pyspark")
        except importlib.metadata.PackageNotFoundError:
            # pyspark is not an installed package: for example with SPARK_HOME its folder is only on the path.
            pass
    from pyspark.version import __version__ as version

    return str(version)


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The differences as texts such as ``headrace 0.1.0 there, 0.2.0 here``."""
    return [
        f"{name} {theirs.get(name, 'unknown')} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise VersionMismatchError, with each difference, if a receiver job's versions differ from ours."""
    different = differences(theirs, current_versions())
    if different:
        raise VersionMismatchError(
            f"The receiver job runs with other versions: {'; '.join(different)}.",
            remedy="Restart the receiver job with this environment, or run the batches with way 'submit'.",
        )
