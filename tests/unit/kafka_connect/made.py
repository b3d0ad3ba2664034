"""Makes definitions of connectors, and loads them as Airflow does: as a file, with the transform module beside it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.kafka_connect.connector import read_connector
from headrace.kafka_connect.definition import Definition, define
from headrace.stream import Stream

CONFLUENT = "io.confluent.connect.elasticsearch.ElasticsearchSinkConnector"
AIVEN = "io.aiven.connect.elasticsearch.ElasticsearchSinkConnector"
OPENSEARCH = "io.aiven.kafka.connect.opensearch.OpenSearchSinkConnector"
TEXTS = "org.apache.kafka.connect.storage.StringConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
AVRO = "io.confluent.connect.avro.AvroConverter"

# One that leaves nothing to decide.
PLAIN = {
    "name": "orders",
    "connector.class": CONFLUENT,
    "topics": "orders",
    "connection.url": "http://search:9200",
    "key.ignore": "true",
    "value.converter": JSON,
    "value.converter.schemas.enable": "false",
}


def defined(
    *, topics: tuple[str, ...] = (), worker: str = "", of: dict[str, Any] | None = None, **more: Any
) -> Definition:
    """The definition of `PLAIN` with these properties; in the names, ``_`` stands for a dot. None leaves one out."""
    properties = {**PLAIN, **{name.replace("_", "."): value for name, value in more.items()}, **(of or {})}
    properties = {name: value for name, value in properties.items() if value is not None}
    return define(read_connector(json.dumps(properties), worker=worker), topics=topics)


def decided(text: str) -> str:
    """The text of a definition after a person has deleted each line of what is to decide."""
    return re.sub(r"(?<=^UNDECIDED = \[\n)(?:    .+,\n)+(?=\]$)", "", text, flags=re.MULTILINE)


@contextmanager
def loaded(definition: Definition, folder: Path, *, text: str = "") -> Iterator[list[Stream]]:
    """The streams of the file. Its folder is where modules are found, as in Airflow's DAGs folder."""
    if definition.transform is not None:
        (folder / f"{definition.transform_module}.py").write_text(definition.transform)
    path = folder / f"{definition.module}.py"
    path.write_text(text or decided(definition.text))
    sys.path.insert(0, str(folder))
    try:
        module = _module(path)
        yield getattr(module, "streams", None) or [module.stream]
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(definition.transform_module, None)


def stream_of(definition: Definition, folder: Path) -> Stream:
    """The only stream of the definition."""
    with loaded(definition, folder) as (stream,):
        return stream


def indices_of(stream: Stream) -> dict[str, str]:
    """The index of each topic's records, with what a record fills in as the definition has it; "" is any topic."""
    (output,), (source,) = stream.elasticsearch_outputs, stream.inputs
    if not source.topic_names:
        return {"": output.index_text}
    return {topic: "".join(map(str, parts)) for topic, parts in output.names.of_topics(source.topic_names).by_topic}


def transform_of(definition: Definition) -> dict[str, Any]:
    """The names in the transform module."""
    assert definition.transform is not None
    names: dict[str, Any] = {}
    exec(definition.transform, names)  # noqa: S102 - the text is what the test is about
    return names


def answer(definition: Definition, name: str) -> str:
    """The answer to a property."""
    (found,) = [str(each.answer) for each in definition.properties if each.name == name]
    return found


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
