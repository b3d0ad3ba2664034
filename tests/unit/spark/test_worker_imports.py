"""Spark's Python workers import little: each batch starts new ones, and a small batch spends its time importing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WORKERS = [
    "headrace.spark.wal_source",
    "headrace.spark.kafka_ranges_source",
    "headrace.spark.elasticsearch_sink",
    "headrace.spark.outputs.kafka.sink",
    "headrace.spark.outputs.parquet.sink",
    "headrace.spark.state.source",
]
# What a worker has imported before it unpickles a data source of ours.
PYSPARK = "pyspark.worker, pyspark.sql.worker.plan_data_source_read, pyspark.sql.worker.write_into_data_source"
HEAVY = ("airflow", "alembic", "headrace.ledger", "headrace.spark.batch_run", "pandas", "sqlalchemy", "typer")


@pytest.mark.parametrize("module", WORKERS)
def test_a_workers_module_imports_no_ledger_and_no_airflow(module: str) -> None:
    code = f"import sys, {PYSPARK}; had = set(sys.modules); import {module}, json; "
    code += "print(json.dumps(sorted(set(sys.modules) - had)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    imported = json.loads(done.stdout)
    assert module in imported
    assert [name for name in imported if name in HEAVY or name.startswith(tuple(f"{heavy}." for heavy in HEAVY))] == []
