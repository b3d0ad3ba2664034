"""A Spark session in this process alone, for commands and tests that run a transform and write nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.spark.sessions import classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[2]"


@contextmanager
def local_session(name: str = "headrace", conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Open a session with two task slots and without Spark's user interface, and stop it at the end.

    If this process has a session, that one is used, and is not stopped. Python workers find modules in the current
    folder, as this process does.

    Args:
        conf: Spark settings, such as ``stream.spark.conf``.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        session = classic_session(name, master=LOCAL_MASTER, conf={**(conf or {}), "spark.ui.enabled": "false"})
    finally:
        # The JVM has inherited it, and its Python workers do.
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
