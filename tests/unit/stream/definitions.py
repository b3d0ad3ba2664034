"""The fields of a definition that can run."""

from __future__ import annotations

from typing import Any

from headrace.stream import (
    ElasticsearchOutput,
    KafkaInput,
)


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "name": "flights",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="flights"),
        "outputs": ElasticsearchOutput(hosts="http://127.0.0.1:9200", index="flights"),
        "batch_interval": "10 s",
        "storage": "/data/headrace",
        "ledger": "sqlite:////data/headrace/ledger.db",
    } | changes


HOSTS = "http://127.0.0.1:9200"
