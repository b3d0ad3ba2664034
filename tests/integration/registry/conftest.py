"""A connection of the session's registry, and topics whose records Confluent's serializers write."""

from __future__ import annotations

import json
import uuid

import pytest
from tests.support.confluent_serializers import ConfluentSerializers

from headrace.connections import variable_name
from headrace.devstack.registry import RegistryServer


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
