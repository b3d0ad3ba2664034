"""The versions of Python, Spark and headrace, which must be equal where a receiver job and its batches run.

Functions are sent to a Connect server with cloudpickle, which works only between equal Python versions. So both ends
compare their versions first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from headrace import __version__
from headrace.errors import HeadraceError


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
    installed = None if "pyspark" in sys.modules else _installed_version("pyspark")
    if installed is not None:
        return installed
    from pyspark.version import __version__ as version

    return str(version)


def version_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The differences as texts such as ``headrace 0.1.0 there, 0.2.0 here``."""
    return [
        f"{name} {theirs.get(name, 'unknown')} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise VersionMismatchError, with each difference, if a receiver job's versions differ from ours."""
    different = version_differences(theirs, current_versions())
    if different:
        raise VersionMismatchError(
            f"The receiver job runs with other versions: {'; '.join(different)}.",
            remedy="Restart the receiver job with this environment, or run the batches with way 'submit'.",
        )


_SPARK_PACKAGES = ("pyspark", "pyspark-client")


class MixedSparkError(HeadraceError):
    """pyspark and pyspark-client, which Airflow's Spark provider requires, are installed in different versions.

    Both install into the folder ``pyspark/``: the one that is installed last overwrites files of the other. What then
    fails, and where, is chance. So whatever starts Spark, or checks a stream, checks this first.
    """


def check_spark_packages() -> None:
    """Raise MixedSparkError if both packages are installed, in different versions. Does not import pyspark."""
    spark, client = map(_installed_version, _SPARK_PACKAGES)
    if spark is None or client is None or spark == client:
        return
    # Not every version of pyspark has a pyspark-client; each version of this one has a pyspark.
    raise MixedSparkError(
        f"pyspark {spark} and pyspark-client {client} are mixed: both install into the folder pyspark/, and overwrite "
        "each other's files.",
        remedy="In this environment, run `pip install --force-reinstall --no-deps "
        f"pyspark=={client} pyspark-client=={client}`.",
    )


def _installed_version(package: str) -> str | None:
    # Not at the top: Spark's Python workers and the caller of a batch server, which is to start at once, need it not.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        # With SPARK_HOME, pyspark is only a folder on the path.
        return None
