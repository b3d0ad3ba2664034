"""Spark's Python workers import little: each batch starts new ones, and a small batch spends its time importing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WORKERS = [
    "headrace.spark.records.wal_source",
    "headrace.spark.records.kafka_ranges_source",
    "headrace.spark.outputs.elasticsearch_sink",
    # To withdraw the dead letters of earlier attempts.
    "headrace.elasticsearch.dead_letter_index",
    "headrace.spark.attempts.shared_jobs",
    "headrace.spark.outputs.kafka",
    "headrace.spark.outputs.parquet",
    "headrace.spark.state.source",
    "headrace.spark.attempts.warm_up",
]
# What a worker has imported before it unpickles a data source of ours.
PYSPARK = "pyspark.worker, pyspark.sql.worker.plan_data_source_read, pyspark.sql.worker.write_into_data_source"
HEAVY = (
    *("airflow", "alembic", "headrace.ledger", "headrace.spark.attempts.attempt", "pandas", "sqlalchemy", "typer"),
    # The official Elasticsearch client and what it loads: it speaks only to servers of its own version.
    *("aiohttp", "elastic_transport", "elasticsearch", "httpx", "requests", "rich"),
)
# These are needed to read Kafka or a definition, and a worker that writes documents does neither.
NOT_TO_WRITE_DOCUMENTS = ("confluent_kafka", "headrace.stream", "pydantic")


@pytest.mark.parametrize("module", WORKERS)
def test_a_workers_module_imports_no_heavy_module(module: str) -> None:
    assert heavy(imported_by(module), HEAVY) == []


def test_a_worker_that_writes_documents_loads_no_kafka() -> None:
    """It does not load definitions either."""
    assert heavy(imported_by("headrace.spark.outputs.elasticsearch_sink"), NOT_TO_WRITE_DOCUMENTS) == []


def imported_by(module: str) -> list[str]:
    code = f"import sys, {PYSPARK}; had = set(sys.modules); import {module}, json; "
    code += "print(json.dumps(sorted(set(sys.modules) - had)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    imported: list[str] = json.loads(done.stdout)
    assert module in imported
    return imported


def heavy(imported: list[str], modules: tuple[str, ...]) -> list[str]:
    return [name for name in imported if name in modules or name.startswith(tuple(f"{module}." for module in modules))]
