"""Describes headrace to Airflow: the entry point of the group ``apache_airflow_provider``.

This file imports nothing heavy: Airflow calls it in every process, before it knows whether it needs headrace.
"""

from __future__ import annotations

from typing import Any

_INTEGRATION = "headrace"


def get_provider_info() -> dict[str, Any]:
    """The provider's description, in the schema ``airflow/provider_info.schema.json``."""
    return {
        "package-name": "headrace",
        "name": "headrace",
        "description": "Micro-batch ingestion from Kafka to Elasticsearch that Airflow runs and Spark computes.",
        "integrations": [
            {
                "integration-name": _INTEGRATION,
                "external-doc-url": "https://spark.apache.org/docs/latest/streaming-programming-guide.html",
                "tags": ["software"],
            }
        ],
        "operators": _modules(
            "headrace.operators.kafka_receiver",
            "headrace.operators.allocate_blocks",
            "headrace.operators.wal_spark_submit",
            "headrace.operators.micro_batch",
            "headrace.operators.replay_batch",
            "headrace.operators.checkpoint",
            "headrace.operators.cleanup",
        ),
        "sensors": _modules("headrace.sensors.kafka_receiver", "headrace.sensors.blocks_ready"),
        "hooks": _modules("headrace.hooks.ledger"),
        "triggers": _modules(
            "headrace.triggers.receiver_job",
            "headrace.triggers.receivers_receiving",
            "headrace.triggers.blocks_ready",
            "headrace.triggers.records_received",
        ),
        # Without a handler Airflow does not normalise these URIs; the entry only makes the scheme known.
        "asset-uris": [{"schemes": ["headrace"], "handler": None}],
        "connection-types": [
            {
                "connection-type": "headrace_ledger",
                "hook-class-name": "headrace.hooks.ledger.LedgerHook",
                "hook-name": "headrace ledger",
            }
        ],
        "extra-links": [
            "headrace.operators.links.SparkUiLink",
        ],
        "plugins": [{"name": "headrace", "plugin-class": "headrace.ui.plugin.HeadracePlugin"}],
        "config": {"headrace": {"description": "Settings of headrace.", "options": _options()}},
    }


def _modules(*names: str) -> list[dict[str, Any]]:
    return [{"integration-name": _INTEGRATION, "python-modules": list(names)}]


def _options() -> dict[str, Any]:
    return {
        "secret_key": {
            "description": (
                "From this key the secret is derived that the receiver job and its batches share; from that, the "
                "token of each job's Spark Connect server. Every worker needs the same key. Empty: core.fernet_key."
            ),
            "version_added": "0.1.0",
            "type": "string",
            "example": None,
            "default": "",
            "sensitive": True,
        },
        "log_folder": {
            "description": (
                "Where receiver jobs write their own log files, which outlive the Airflow task that started them. "
                "Empty: the folder 'headrace' below logging.base_log_folder."
            ),
            "version_added": "0.1.0",
            "type": "string",
            "example": "/var/log/headrace",
            "default": "",
        },
        "poll_interval": {
            "description": (
                "Seconds between two looks into the ledger of an operator, sensor or trigger that waits, where it was "
                "given no interval of its own. Not set: 1 s; 0.2 s for a batch's blocks; 5 s for a batch's turn."
            ),
            "version_added": "0.1.0",
            "type": "float",
            "example": "0.5",
            "default": None,
        },
    }
