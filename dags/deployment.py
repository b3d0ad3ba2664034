"""Deployment settings of the streams in this folder: where their log and ledger are, and which Spark runs them.

They come from environment variables, so that the same DAG files run on one machine and in docker-compose.yaml:

=========================  ==========================================================================================
HEADRACE_STORAGE           the folder or URL of the write-ahead logs, manifests and checkpoints
HEADRACE_STORAGE_SHARED    "1" where that folder is mounted on every host of the Spark cluster
HEADRACE_LEDGER            a SQLAlchemy URL without a password, or "connection:<Airflow connection id>"
HEADRACE_SPARK_MASTER      a Spark master; without it Spark runs on Airflow's own machine
HEADRACE_SPARK_CORES       how many of a cluster's cores one stream may take
HEADRACE_LINES             "host:port" of the TCP server whose words are counted; without it localhost:9999
=========================  ==========================================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.stream import SparkSettings, Storage

_HOME = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser().absolute() / "headrace"
_CORES = os.environ.get("HEADRACE_SPARK_CORES")

STORAGE = Storage(
    url=os.environ.get("HEADRACE_STORAGE", str(_HOME / "storage")),
    shared=os.environ.get("HEADRACE_STORAGE_SHARED") == "1",
)
LEDGER = os.environ.get("HEADRACE_LEDGER", f"sqlite:///{_HOME / 'ledger.db'}")
SPARK_MASTER = os.environ.get("HEADRACE_SPARK_MASTER")
SPARK_CONF = {"spark.cores.max": _CORES} if _CORES else {}
LINES_HOST, _, _port = os.environ.get("HEADRACE_LINES", "localhost:9999").rpartition(":")
LINES_PORT = int(_port)
SPARK = SparkSettings(master=SPARK_MASTER, conf=SPARK_CONF)
