"""Names datasets by OpenLineage's conventions: the namespace is the server, the name the topic, index or path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from headrace.connections import Connection, from_text
from headrace.runs.environment import connection_json
from headrace.stream import ElasticsearchOutput, KafkaOutput, ParquetOutput

if TYPE_CHECKING:
    from headrace.stream import KafkaInput

_KAFKA_PORT = 9092


@dataclass(frozen=True, slots=True)
class DatasetName:
    """A dataset's namespace and name."""

    namespace: str
    name: str


def topic_name(source: KafkaInput | KafkaOutput, topic: str) -> DatasetName:
    """The name of a topic: the namespace has the first of the bootstrap servers."""
    from headrace.kafka.client import connection_config

    servers = source.bootstrap_servers
    if source.connection is not None:
        servers = str(connection_config(_connection(source.connection))["bootstrap.servers"])
    host = str(servers).split(",", maxsplit=1)[0].strip().rpartition("//")[2]
    return DatasetName(f"kafka://{host if ':' in host else f'{host}:{_KAFKA_PORT}'}", topic)


def output_name(output: Any) -> DatasetName | None:
    """The dataset that an output writes; None for outputs that are no dataset (console, functions)."""
    if isinstance(output, ElasticsearchOutput):
        return index_name(output, output.index)
    if isinstance(output, KafkaOutput):
        return topic_name(output, output.topic)
    if isinstance(output, ParquetOutput):
        parts = urlsplit(output.path)
        return DatasetName("file", unquote(parts.path) if parts.scheme else output.path)
    return None


def index_name(output: ElasticsearchOutput, index: str) -> DatasetName:
    """The name of an index in the output's cluster: the namespace has the first of its nodes."""
    from headrace.elasticsearch.transport import Cluster

    if output.connection is None:
        cluster = Cluster.of(output)
    else:
        cluster = Cluster.from_connection(_connection(output.connection))
    parts = urlsplit(str(cluster.nodes[0]))
    return DatasetName(f"elasticsearch://{parts.hostname}:{parts.port}", index)


def _connection(conn_id: str) -> Connection:
    return from_text(conn_id, connection_json(conn_id))
