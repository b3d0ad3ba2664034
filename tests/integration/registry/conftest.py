"""A connection of the session's registry, and topics whose records Confluent's serializers write."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.confluent_serializers import ConfluentSerializers

from headrace.batch.readers import ask_reader
from headrace.connections import variable_name
from headrace.devstack.registry import RegistryServer
from headrace.kept_values import KeptValues
from headrace.stream import ConsoleOutput, KafkaInput, Stream


@pytest.fixture
def connection(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a connection of the registry."""
    connection_id = f"schemas_{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(variable_name(connection_id), json.dumps({"conn_type": "http", "host": registry.url}))
    return connection_id


@pytest.fixture
def serializers(registry: RegistryServer) -> ConfluentSerializers:
    """Those of a topic of the test's own."""
    return ConfluentSerializers(registry.url)


@pytest.fixture
def asked(serializers: ConfluentSerializers, tmp_path: Path) -> Callable[..., tuple[Any, KeptValues]]:
    """Gives the decoder of the topic's keys or values with its columns, and what it keeps, as the first run of a batch
    has them."""

    def ask(decoder: Any, part: str = "value") -> tuple[Any, KeptValues]:
        source = KafkaInput(bootstrap_servers="127.0.0.1:1", topics=serializers.topic, **{f"{part}_decoder": decoder})
        stream = Stream(
            name="orders",
            inputs=source,
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=str(tmp_path),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
        )
        answered = ask_reader(stream, stream.inputs[0], f"{part}_decoder").decoder
        return answered, KeptValues(answered.kept_url(stream.folder_url), "first_run")

    return ask
