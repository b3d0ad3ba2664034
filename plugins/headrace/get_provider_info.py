"""Describes headrace to Airflow: the entry point of the group ``apache_airflow_provider``.

This file imports nothing heavy: Airflow calls it in every process, before it knows whether it needs headrace.

Two things are not here. The plugin is found by the entry point group ``airflow.plugins``: an entry here would register
it a second time where ``core.lazy_discover_providers`` is off. And Airflow takes the link to the documentation from the
package's project URLs.
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
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "operators": _modules(
            "headrace.operators.kafka_receiver",
            "headrace.operators.batch_steps",
            "headrace.operators.wal_spark_submit",
            "headrace.operators.micro_batch",
            "headrace.operators.replay_batch",
            "headrace.operators.repair_batches",
        ),
        "sensors": _modules("headrace.sensors.kafka_receiver", "headrace.sensors.blocks_ready"),
        "hooks": _modules("headrace.hooks.ledger"),
        "triggers": _modules(
            "headrace.triggers.ledger", "headrace.triggers.records_received", "headrace.triggers.repair_due"
        ),
        # Without a handler Airflow does not normalise these URIs; the entry only makes the scheme known.
        "asset-uris": [{"schemes": ["headrace"], "handler": None}],
        "connection-types": [
            {
                "connection-type": "headrace_ledger",
                "hook-class-name": "headrace.hooks.ledger.LedgerHook",
                "hook-name": "headrace ledger",
                "ui-field-behaviour": {
                    "hidden-fields": ["extra"],
                    "relabeling": {"schema": "Database, or path of the SQLite file", "host": "Host (empty: SQLite)"},
                    "placeholders": {
                        "host": "db.example.com",
                        "port": "5432",
                        "schema": "headrace, or /data/ledger.db",
                    },
                },
                "conn-fields": _ledger_fields(),
            }
        ],
        "extra-links": [
            "headrace.operators.links.SparkUiLink",
        ],
        "cli": ["headrace.cli.airflow_commands.airflow_commands"],
        "config": {"headrace": {"description": "Settings of headrace.", "options": _options()}},
    }


def _modules(*names: str) -> list[dict[str, Any]]:
    return [{"integration-name": _INTEGRATION, "python-modules": list(names)}]


def _ledger_fields() -> dict[str, Any]:
    """The fields of the connection's extra in Airflow's form: libpq's options that people set most."""
    return {
        "sslmode": {
            "label": "TLS mode",
            "description": "Postgres only: whether TLS is used, and what is verified. Empty: prefer.",
            "schema": {
                "type": ["string", "null"],
                "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full", None],
            },
        },
        "sslrootcert": _path("TLS certificate authority", "Postgres only: file of the certificates to trust."),
        "sslcert": _path("TLS client certificate", "Postgres only: file of this client's certificate."),
        "sslkey": _path("TLS client key", "Postgres only: file of the client certificate's private key."),
        "target_session_attrs": {
            "label": "Kind of server",
            "description": "Postgres only: which of several hosts to use. read-write follows a switchover.",
            "schema": {"type": ["string", "null"], "enum": ["any", "read-write", "primary", None]},
        },
        "connect_timeout": {
            "label": "Connect timeout (seconds)",
            "description": "Postgres only: for each address. Empty: 10.",
            "schema": {"type": ["integer", "null"], "minimum": 1},
        },
        "options": {
            "label": "Server settings",
            "description": "Postgres only: settings of the session, such as -c statement_timeout=30000.",
            "schema": {"type": ["string", "null"]},
        },
    }


def _path(label: str, description: str) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"]}}


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
        "metrics_token": {
            "description": (
                "A scraper that sends this as its bearer token gets /headrace/metrics of all streams, without a login. "
                "Empty: /headrace/metrics needs Airflow's login as every other page. At least 32 random characters."
            ),
            "version_added": "0.1.0",
            "type": "string",
            "example": None,
            "default": "",
            "sensitive": True,
        },
        "ledgers": {
            "description": (
                "Ledgers that the page and the API show beside those of the streams that Airflow's DAGs declare: URLs "
                "or connection ids, separated by commas. Connections of the type headrace_ledger are shown anyway. If "
                "a DAG names its ledger by the URL of a Postgres server, or by a connection of another type, the API "
                "server opens it only if it is listed here."
            ),
            "version_added": "0.1.0",
            "type": "string",
            "example": "headrace_ledger_default, sqlite:////data/ledger.db",
            "default": "",
        },
        "ledger": {
            "description": (
                "The ledger of `airflow headrace …`, unless --ledger or HEADRACE_LEDGER names another. A stream's "
                "tasks use the ledger of its definition."
            ),
            "version_added": "0.1.0",
            "type": "string",
            "example": "postgresql+psycopg://headrace@db.example.com/headrace",
            "default": "connection:headrace_ledger_default",
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
                "Default poll interval, in seconds, of operators, sensors and triggers that wait for the ledger. Not "
                "set: 1 s; 0.2 s for a batch's blocks; 5 s for a batch's turn."
            ),
            "version_added": "0.1.0",
            "type": "float",
            "example": "0.5",
            "default": None,
        },
    }
