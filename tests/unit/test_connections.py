"""Connections from the environment, in Airflow's two forms."""

from __future__ import annotations

import pytest

from headrace.connections import Connection, ConnectionFormatError, ConnectionNotFoundError, from_text, resolve


def test_json_and_uri_give_the_same() -> None:
    wanted = Connection("es", "elasticsearch", "h", 9200, "me", "p@ss/word", "https", {"verify_certs": True})
    assert from_text("es", wanted.to_json()) == wanted
    uri = "elasticsearch://me:p%40ss%2Fword@h:9200/https?__extra__=%7B%22verify_certs%22%3A+true%7D"
    assert from_text("es", uri) == wanted


def test_extra_may_be_a_json_string() -> None:
    connection = from_text("k", '{"conn_type": "kafka", "extra": "{\\"bootstrap.servers\\": \\"h:1\\"}"}')
    assert connection.extra == {"bootstrap.servers": "h:1"}


def test_resolve_reads_the_environment() -> None:
    assert resolve("kafka_default", {"AIRFLOW_CONN_KAFKA_DEFAULT": "kafka://h:1"}).host == "h"
    with pytest.raises(ConnectionNotFoundError, match="AIRFLOW_CONN_NOPE"):
        resolve("nope", {})


@pytest.mark.parametrize("text", ["hunter2", '{"conn_type": hunter2}', "kafka://h:hunter2", '{"port": "hunter2"}'])
def test_what_cannot_be_read_is_not_repeated(text: str) -> None:
    with pytest.raises(ConnectionFormatError) as refused:
        from_text("kafka", text)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_repr_hides_secrets() -> None:
    shown = repr(Connection("es", "elasticsearch", password="hunter2", extra={"api_key": "hunter3"}))
    assert "hunter" not in shown
