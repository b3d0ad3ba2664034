"""pyspark and pyspark-client, which Airflow's Spark provider requires, install into the same folder ``pyspark/``.

Of two versions, the one that is installed last overwrites files of the other. What then fails, and where, is chance. So
whatever starts Spark, or checks a stream, checks this first.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from headrace.errors import HeadraceError

PACKAGES = ("pyspark", "pyspark-client")


class MixedSparkError(HeadraceError):
    """pyspark and pyspark-client are installed in different versions."""


def check_spark_packages() -> None:
    """Raise MixedSparkError if both packages are installed, in different versions. Does not import pyspark."""
    spark, client = map(_version, PACKAGES)
    if spark is None or client is None or spark == client:
        return
    # Not every version of pyspark has a pyspark-client; each version of this one has a pyspark.
    raise MixedSparkError(
        f"pyspark {spark} and pyspark-client {client} are mixed: both install into the folder pyspark/, and overwrite "
        "each other's files.",
        remedy="In this environment, run `pip install --force-reinstall --no-deps "
        f"pyspark=={client} pyspark-client=={client}`.",
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # With SPARK_HOME, pyspark is only a folder on the path.
        return None
