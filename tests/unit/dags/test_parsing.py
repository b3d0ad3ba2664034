"""A DAG file is parsed again and again: nothing heavy may be imported then."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("pyspark", "py4j", "confluent_kafka", "elasticsearch", "pyarrow", "pandas", "numpy", "alembic", "psycopg")
OURS = (
    "headrace.ledger",
    "headrace.wal",
    "headrace.receiver",
    "headrace.elasticsearch",
    "headrace.spark",
    "headrace.devstack",
)

# Without the OpenLineage provider, which only the tests need: the Spark provider imports it where it is installed.
DAG_FILE = """
import json, sys
sys.modules["openlineage"] = None
import airflow.sdk
before = set(sys.modules)
from headrace.dags import stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream
receiver, batches = stream_dags(Stream(
    name="flights",
    inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="flights"),
    outputs=ElasticsearchOutput(hosts="http://localhost:9200", index="flights"),
    batch_interval="10 s",
    storage="/somewhere",
    ledger="sqlite:////somewhere/ledger.db",
))
print(json.dumps({"before": sorted(before), "after": sorted(sys.modules)}))
"""


def test_parsing_a_stream_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", DAG_FILE], capture_output=True, text=True, check=True)
    reported = json.loads(done.stdout.splitlines()[-1])
    added = set(reported["after"]) - set(reported["before"])
    assert sorted(name for name in added if name.split(".")[0] in HEAVY) == []
    assert sorted(name for name in reported["after"] if name.startswith(OURS)) == []
    # Some 200 beyond Airflow's own where they were counted; seconds would depend on what else the machine does.
    assert len(added) < 400
