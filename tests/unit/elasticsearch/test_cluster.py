from __future__ import annotations

import base64
import json
import pickle

import pytest

from headrace.connections import Connection, ConnectionTypeError, from_text
from headrace.elasticsearch.cluster import Cluster, Node
from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.stream import ElasticsearchOutput


def connection(**fields: object) -> Connection:
    return Connection(**{"id": "es", "conn_type": "elasticsearch", "host": "es.example", **fields})  # type: ignore[arg-type]


def test_hosts_are_urls() -> None:
    output = ElasticsearchOutput(hosts=("http://a", "b:9201", "https://c:9443/prefix/"), index="i")
    assert Cluster.of(output).nodes == (
        Node("http", "a", 9200),
        Node("http", "b", 9201),
        Node("https", "c", 9443, "/prefix"),
    )


def test_a_connection_is_looked_up_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"conn_type": "elasticsearch", "host": "a,b:9201", "port": 9243, "schema": "https"}
    monkeypatch.setenv("AIRFLOW_CONN_ES", json.dumps(fields | {"login": "me", "password": "hunter2"}))
    cluster = Cluster.of(ElasticsearchOutput(connection="es", index="i"))
    assert cluster.nodes == (Node("https", "a", 9243), Node("https", "b", 9201))
    assert cluster.authorization == "Basic " + base64.b64encode(b"me:hunter2").decode()


@pytest.mark.parametrize(
    ("extra", "authorization"),
    [
        ({"api_key": "encoded=="}, "ApiKey encoded=="),
        ({"api_key": "id:key"}, "ApiKey " + base64.b64encode(b"id:key").decode()),
        ({"api_key": ["id", "key"]}, "ApiKey " + base64.b64encode(b"id:key").decode()),
        ({"bearer_token": "t"}, "Bearer t"),
        ({}, None),
    ],
)
def test_credentials_become_the_authorization_header(extra: dict[str, object], authorization: str | None) -> None:
    assert Cluster.from_connection(connection(extra=extra)).authorization == authorization


def test_secrets_are_pickled_but_not_in_the_repr() -> None:
    cluster = Cluster.from_connection(connection(login="me", password="hunter2"))
    secret = base64.b64encode(b"me:hunter2").decode()
    assert secret not in repr(cluster)
    assert pickle.loads(pickle.dumps(cluster)).authorization == f"Basic {secret}"  # noqa: S301


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("https://me:hunter2@es.example:9243", Node("https", "es.example", 9243)),
        ("https://me:hunter2@es.example:9243/https", Node("https", "es.example", 9243)),
        ("elasticsearch://me:hunter2@es.example:9243/HTTPS", Node("https", "es.example", 9243)),
        ("elasticsearch://https://me:hunter2@es.example:9243", Node("https", "es.example", 9243)),
        ("HTTPS://me:hunter2@es.example:9243", Node("https", "es.example", 9243)),
        ("http://me:hunter2@es.example:9243", Node("http", "es.example", 9243)),
        ('{"conn_type": "https", "host": "es.example", "login": "me"}', Node("https", "es.example", 9200)),
        ('{"conn_type": "elasticsearch", "host": "es.example", "schema": "HTTPS"}', Node("https", "es.example", 9200)),
        ('{"host": "es.example", "schema": "https"}', Node("https", "es.example", 9200)),
    ],
)
def test_who_asks_for_https_gets_it(text: str, node: Node) -> None:
    found = from_text("es", text)
    assert Cluster.from_connection(found).nodes == (node,)
    assert found.login in ("me", None)


@pytest.mark.parametrize("conn_type", ["kafka", "postgres", "aws"])
def test_a_connection_of_another_type_is_noticed(conn_type: str) -> None:
    with pytest.raises(ConnectionTypeError, match=f"'es' is of type '{conn_type}'"):
        Cluster.from_connection(connection(conn_type=conn_type, password="hunter2"))


@pytest.mark.parametrize(
    "wrong",
    [
        connection(host=None),
        connection(schema="ftp"),
        connection(conn_type="https", schema="http"),
        connection(conn_type="https", host="a,http://b"),
        connection(schema="https", host="http://a"),
        connection(extra={"sniff_on_start": True}),
        connection(extra={"verify_certs": "perhaps"}),
        connection(login="me", extra={"api_key": "k"}),
        connection(host="http://me:hunter2@a"),
    ],
)
def test_unknown_or_invalid_connection_settings_are_refused(wrong: Connection) -> None:
    with pytest.raises(IndexingOptionsError) as caught:
        Cluster.from_connection(wrong)
    assert "hunter2" not in str(caught.value)
