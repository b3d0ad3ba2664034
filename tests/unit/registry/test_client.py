"""The settings of a registry's connection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.connections import Connection, ConnectionTypeError, from_text
from headrace.registry.client import RegistrySettingError, client_config

FILE = __file__


def config(text: str | dict[str, Any]) -> dict[str, Any]:
    """Those that the connection gives, without the limits of time."""
    found = client_config(from_text("schemas", text if isinstance(text, str) else json.dumps(text)))
    return {name: value for name, value in found.items() if not name.startswith(("timeout", "max.", "retries"))}


@pytest.mark.parametrize(
    ("connection", "url"),
    [
        ("http://registry:8081", "http://registry:8081"),
        ("https://registry", "https://registry"),
        ("http://registry:8080/apis/ccompat/v7", "http://registry:8080/apis/ccompat/v7"),
        ("schema-registry://https://registry:8081", "https://registry:8081"),
        ({"conn_type": "http", "host": "https://registry:8081/below/"}, "https://registry:8081/below"),
        ({"conn_type": "http", "host": "registry", "port": 8081, "schema": "https"}, "https://registry:8081"),
        ({"conn_type": "http", "host": "registry", "extra": {"path": "/v7"}}, "http://registry/v7"),
        ({"conn_type": "https", "host": "a:1,b:2"}, "https://a:1,https://b:2"),
        ({"conn_type": "http", "host": "http://[::1]:8081"}, "http://[::1]:8081"),
    ],
)
def test_an_address_is_taken_as_airflow_has_it(connection: Any, url: str) -> None:
    assert config(connection) == {"url": url}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"login": "u", "password": "p:w"}, {"basic.auth.user.info": "u:p:w"}),
        (
            {"extra": {"bearer_token": "t"}},
            {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": "t",
                "bearer.auth.logical.cluster": "",
            },
        ),
        (
            {
                "extra": {
                    "oauth_token_url": "https://login/token",
                    "oauth_client_id": "i",
                    "oauth_client_secret": "s",
                    "logical_cluster": "lsrc-1",
                    "identity_pool": "pool-1",
                }
            },
            {
                "bearer.auth.credentials.source": "OAUTHBEARER",
                "bearer.auth.issuer.endpoint.url": "https://login/token",
                "bearer.auth.client.id": "i",
                "bearer.auth.client.secret": "s",
                "bearer.auth.scope": "",
                "bearer.auth.logical.cluster": "lsrc-1",
                "bearer.auth.identity.pool.id": "pool-1",
            },
        ),
        (
            {"extra": {"ca_certs": FILE, "client_cert": FILE, "client_key": FILE}},
            {"ssl.ca.location": FILE, "ssl.certificate.location": FILE, "ssl.key.location": FILE},
        ),
        ({"extra": {"ssl.ca.location": FILE}}, {"ssl.ca.location": FILE}),
        ({"extra": {"verify_certs": False, "proxy": "http://p:1"}}, {"ssl.ca.location": False, "proxy": "http://p:1"}),
    ],
)
def test_a_log_in_and_certificates_are_passed_on(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = config({"conn_type": "https", "host": "registry", **fields})
    assert found == {"url": "https://registry", **wanted}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": None}, "has no host"),
        ({"host": "ftp://registry"}, "no http or https URL"),
        ({"host": "http://u:p@registry"}, "or holds a login"),
        ({"extra": {"bearer_tokn": "t"}}, "Did you mean bearer_token"),
        ({"login": "u", "extra": {"bearer_token": "t"}}, "has a token and a login"),
        ({"extra": {"ca_certs": "/none/ca.pem"}}, "The file /none/ca.pem, which ca_certs of connection"),
        ({"extra": {"oauth_token_url": "https://login"}}, "has no oauth_client_id, oauth_client_secret"),
    ],
)
def test_a_setting_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrySettingError, match=message):
        config({"conn_type": "https", "host": "registry", **fields})


def test_a_connection_of_another_server_is_refused() -> None:
    with pytest.raises(ConnectionTypeError):
        client_config(Connection("kafka_default", "kafka", host="kafka"))
