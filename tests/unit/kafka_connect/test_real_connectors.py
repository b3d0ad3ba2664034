"""Connectors after those of public repositories: each gives a definition that loads, and that headrace can run.

The names of hosts, and all secrets, are others than there.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.sdk.execution_time import task_runner
from tests.unit.kafka_connect.made import decided, indices_of, loaded

from headrace.kafka_connect.connector import read_connector
from headrace.kafka_connect.definition import Definition, define
from headrace.spark.records.transforms import check_transform
from headrace.stream import Stream, StreamDefinitionError
from headrace.stream.stream import check_extensions

CONNECTORS = Path(__file__).with_name("connectors")
SECRET = "hunter2hunter2"
WORKER = frozenset({"key.converter", "value.converter"})


class Promised(NamedTuple):
    """What the properties promise: the index of each topic, ids, what a record without a value is, whether refused
    documents fail a batch; and what is left for a person to decide."""

    after: str
    """The file of the public repository; "" where the index of repositories names none."""
    indices: dict[str, str]
    ids: str
    tombstones: str
    fails: bool
    to_decide: frozenset[str] = frozenset()


REAL = {
    "table_with_key_field.json": Promised(
        "debezium/debezium-examples unwrap-smt/es-sink.json", {"customers": "customers"}, "key", "delete", True, WORKER
    ),
    "avro_with_login.json": Promised(
        "confluentinc/cp-demo scripts/connectors/submit_elastic_sink_config.sh",
        {"WIKIPEDIABOT": "wikipediabot"},
        *("record", "dead_letter", True),
    ),
    "opensearch_with_predicates.json": Promised(
        "Ed-Fi-Alliance-OSS/Data-Management-Service eng/docker-compose/opensearch_connector.json",
        {
            "edfi.dms.document": "edfi.dms.document",
            "edfi.dms.educationorganizationhierarchytermslookup": "edfi.dms.educationorganizationhierarchytermslookup",
        },
        *("key", "delete", False),
        frozenset(
            {
                "transforms.castHierarchy.type",
                "transforms.toOpenSearchIndex.type",
                "transforms.deletedToTombstone.type",
                "index.write.method",
            }
        ),
    ),
    "aiven_with_properties_of_another.json": Promised(
        "Ed-Fi-Alliance-OSS/Data-Management-Service eng/docker-compose/elasticsearch_connector.json",
        {"edfi.dms.document": "edfi.dms.document"},
        *("key", "delete", False),
        frozenset(
            {
                *("key.converter", "transforms.toOpenSearchIndex.type", "transforms.deletedToTombstone.type"),
                *("behavior.on.version.conflict", "index.write.method", "flush.synchronously"),
            }
        ),
    ),
    "confluent_quickstart.properties": Promised(
        "confluentinc/kafka-connect-elasticsearch config/quickstart-elasticsearch.properties",
        {"test-search-sink": "test-search-sink"},
        *("record", "dead_letter", True, frozenset({"value.converter"})),
    ),
    "aiven_quickstart.properties": Promised(
        "Aiven-Open/elasticsearch-connector-for-apache-kafka config/quickstart-elasticsearch.properties",
        {"test-search-sink": "test-search-sink"},
        *("record", "ignore", True, frozenset({"value.converter"})),
    ),
    "opensearch_quickstart.properties": Promised(
        "Aiven-Open/opensearch-connector-for-apache-kafka config/quickstart-opensearch.properties",
        {"test-search-sink": "test-search-sink"},
        *("record", "ignore", True, frozenset({"value.converter"})),
    ),
    "cloud.json": Promised(
        "confluentinc/kafka-tutorials omnichannel-commerce sink.sql",
        {"orders_enriched": "orders_enriched"},
        *("record", "dead_letter", True, frozenset({"connection.user"})),
    ),
    "cloud_v2.json": Promised(
        "",
        {name: name for name in ("hotel_inventory", "transport_availability", "flight_schedule")},
        *("record", "dead_letter", True),
    ),
    "cloud_opensearch.json": Promised(
        "",
        {"flagged_user": "flagged_user"},
        "record",
        "ignore",
        False,
        frozenset({"behavior.on.error", "connector.class"}),
    ),
    "json_with_schema.json": Promised(
        "thomashuan88/mysql2elastic es_conn.sh",
        {"mysql.testdb.orders": "mysql.testdb.orders"},
        *("record", "dead_letter", True),
    ),
    "old_unwrap.json": Promised(
        "oskardudycz/kafka-connect docker/connect/scripts/init.sh",
        {"dumb_table": "dumb_table"},
        *("key", "dead_letter", True, WORKER),
    ),
    "upsert_of_a_table.json": Promised(
        "pvduc-dev/message-broker sink/sink.sh",
        {"mysql.inventory.user": "mysql.inventory.user"},
        *("key", "delete", True, WORKER | {"write.method"}),
    ),
    "msk.properties": Promised(
        "dev-sjlee/aws-resources-example docs/Analytics/MSK/03-msk-connector-and-opensearch-service.md",
        {"app.logs": "app.logs"},
        *("record", "dead_letter", True, frozenset({"topic.index.map"})),
    ),
    "topics_by_pattern.json": Promised(
        "", {"": "{topic}"}, "key", "delete", True, frozenset({"topics.regex", "transforms.route.type"})
    ),
    "data_stream.json": Promised(
        "",
        {"data-fabric-ALL-devices": "data-fabric-all-devices"},
        *("record", "ignore", False),
        frozenset({"value.converter", "data.stream.type", "data.stream.dataset"}),
    ),
    "index_of_the_day_over_tls.json": Promised(
        "",
        {name: f"logs-{name}-{{timestamp:%Y.%m.%d}}" for name in ("logs-topic", "metrics-topic", "events-topic")},
        *("record", "ignore", False),
        frozenset({"value.converter", "transforms.TimestampRouter.type"}),
    ),
    "avro_with_renamed_fields.json": Promised(
        "", {"edgar-logs-formatted": "edgar-logs-formatted"}, "record", "ignore", False
    ),
    "movies_in_avro.json": Promised(
        "",
        {"movitiz.movie_show.movies": "movitiz.movie_show.movies"},
        *("key", "delete", True, frozenset({"write.method"})),
    ),
}


def of_file(name: str) -> Definition:
    path = CONNECTORS / name
    return define(read_connector(path.read_text(), name=path.stem))


def test_each_file_is_promised_something() -> None:
    assert {path.name for path in CONNECTORS.iterdir()} == REAL.keys()
    assert len(REAL) > 12


@pytest.mark.parametrize("name", REAL)
def test_a_definition_does_what_the_properties_promise(name: str, tmp_path: Path) -> None:
    promised = REAL[name]
    found: dict[str, str] = {}
    with loaded(of_file(name), tmp_path) as streams:
        for stream in streams:
            (output,) = stream.elasticsearch_outputs
            found |= indices_of(stream)
            assert output.document_ids.kind == promised.ids
            assert output.tombstone_action == promised.tombstones
            assert (output.dead_letter_limit.passed(1, 1_000_000) is not None) == promised.fails
            assert not promised.fails or output.dead_letter_limit.number == 0
    assert found == promised.indices


@pytest.mark.parametrize("name", REAL)
def test_a_definition_passes_headraces_own_checks(name: str, tmp_path: Path) -> None:
    with loaded(of_file(name), tmp_path) as streams:
        assert len({stream.name for stream in streams}) == len(streams)
        for stream in streams:
            check_extensions(stream)
            check_transform(stream)
            assert Stream.from_json(stream.to_json()) == stream


@pytest.mark.parametrize("name", REAL)
def test_what_is_to_decide_keeps_the_file_from_loading(name: str, tmp_path: Path) -> None:
    definition = of_file(name)
    left = {each.name for each in definition.to_decide}
    assert left == REAL[name].to_decide
    if not left:
        assert "UNDECIDED" not in definition.text
        return
    with pytest.raises(StreamDefinitionError) as error, loaded(definition, tmp_path, text=definition.text):
        pass
    assert all(each in str(error.value) for each in left)
    assert "delete its line from UNDECIDED" in str(error.value)
    assert decided(definition.text) != definition.text


@pytest.mark.parametrize("name", REAL)
def test_each_property_has_an_answer_in_the_text(name: str) -> None:
    definition = of_file(name)
    given = read_connector((CONNECTORS / name).read_text()).properties
    answered = [each.name for each in definition.properties]
    assert len(answered) == len(set(answered))
    assert given.keys() <= set(answered)
    comments = [line for line in definition.text.splitlines() if line.startswith("# - ")]
    assert [line.split(" ")[2].rstrip(":") for line in comments] == answered


@pytest.mark.parametrize("name", REAL)
def test_no_secret_is_in_a_definition(name: str) -> None:
    definition = of_file(name)
    assert SECRET not in f"{definition}"
    assert "ABCDEFGHIJ123456" not in f"{definition}"


def test_airflow_finds_the_dags_of_each_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed as by the DAG processor. What is to decide is an import error there."""
    monkeypatch.setattr("airflow.configuration.AIRFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", object(), raising=False)
    dags = tmp_path / "dags"
    dags.mkdir()
    for name in ("cloud_v2.json", "data_stream.json"):
        (dags / f"{Path(name).stem}.py").write_text(of_file(name).text)
    bag = BundleDagBag(str(dags / "cloud_v2.py"), bundle_path=dags, bundle_name="dags", load_op_links=False)
    assert bag.import_errors == {}
    topics = REAL["cloud_v2.json"].indices
    of_each = [f"tba_local_info_1-{topic}_{dag}" for topic in topics for dag in ("batches", "receiver", "repair")]
    assert sorted(bag.dags) == sorted(of_each)
    undecided = BundleDagBag(str(dags / "data_stream.py"), bundle_path=dags, bundle_name="dags", load_op_links=False)
    assert not undecided.dags
    assert "data.stream.type" in "".join(undecided.import_errors.values())
