"""A registry that asks who is there: a real one behind a server with TLS that wants a certificate, a login or a token.
Apicurio's own log-in needs a login server of its kind, so what is asked for stands before it."""

from __future__ import annotations

import base64
import json
import ssl
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jwt
import pytest
import requests
from tests.support.certificates import write_certificate
from tests.support.json_server import JsonHandler, JsonServer
from tests.support.token_server import AUDIENCE, CLIENT_ID, CLIENT_SECRET, TokenServer

from headrace.connections import variable_name
from headrace.devstack.registry import RegistryServer
from headrace.registry.client import Registry, RegistryRefusedError, RegistryUnavailableError

SCHEMA = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'
PASSWORD = "the password of a registry"


class _Handler(JsonHandler):
    """Passes on what is asked for with the log-in that the gateway wants."""

    gateway: ClassVar[Gateway]

    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        if not self.gateway.lets_in(str(self.headers["Authorization"])):
            self.answer(401, b'{"error_code": 401, "message": "Unauthorized"}')
            return
        found = requests.get(self.gateway.registry_url + self.path, timeout=30)
        self.answer(found.status_code, found.content)


class Gateway(JsonServer):
    """HTTPS before a registry. ``lets_in`` judges the header ``Authorization``."""

    def __init__(self, registry: RegistryServer, folder: Path, *, client_certificate: bool) -> None:
        self.registry_url = registry.url
        self.lets_in: Callable[[str], bool] = lambda _: True
        self.ca, key = folder / "gateway.pem", folder / "gateway.key"
        write_certificate(self.ca, key, "gateway")
        self.certificate, self.key = folder / "client.pem", folder / "client.key"
        write_certificate(self.certificate, self.key, "a client")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        if client_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.certificate)
        super().__init__(type("_Handler", (_Handler,), {"gateway": self}), context)


@pytest.fixture
def schema_id(registry: RegistryServer) -> int:
    answer = requests.post(
        f"{registry.url}/subjects/logins-{uuid.uuid4().hex[:8]}/versions", json={"schema": SCHEMA}, timeout=30
    )
    answer.raise_for_status()
    return int(answer.json()["id"])


@pytest.fixture
def open_gateway(registry: RegistryServer, tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []

    def make(*, client_certificate: bool = False) -> Gateway:
        made.append(Gateway(registry, tmp_path, client_certificate=client_certificate))
        return made[-1]

    yield make
    for gateway in made:
        gateway.close()


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    server = TokenServer()
    yield server
    server.close()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    def make(gateway: Gateway, login: str | None = None, password: str | None = None, **extra: Any) -> Registry:
        given = {"ca_certs": str(gateway.ca), **extra}
        fields = {"conn_type": "https", "host": gateway.url, "login": login, "password": password, "extra": given}
        monkeypatch.setenv(variable_name("guarded"), json.dumps(fields))
        return Registry.of("guarded")

    return make


def test_a_login(open_gateway: Any, ask: Any, schema_id: int) -> None:
    gateway = open_gateway()
    wanted = base64.b64encode(f"headrace:{PASSWORD}".encode()).decode()
    gateway.lets_in = lambda authorization: authorization == f"Basic {wanted}"
    assert json.loads(ask(gateway, "headrace", PASSWORD).schema(schema_id).schema.text) == json.loads(SCHEMA)
    with pytest.raises(RegistryRefusedError, match="HTTP 401"):
        ask(gateway, "headrace", "another password").schema(schema_id)


def test_a_certificate(open_gateway: Any, ask: Any, schema_id: int) -> None:
    gateway = open_gateway(client_certificate=True)
    by_certificate = {"client_cert": str(gateway.certificate), "client_key": str(gateway.key)}
    assert ask(gateway, **by_certificate).schema(schema_id).format == "AVRO"
    with pytest.raises(RegistryUnavailableError, match=r"(?i)certificate required"):
        ask(gateway).schema(schema_id)


def test_a_server_that_is_not_trusted(open_gateway: Any, ask: Any, schema_id: int) -> None:
    gateway = open_gateway()
    with pytest.raises(RegistryUnavailableError, match="certificate verify failed"):
        ask(gateway, ca_certs=None).schema(schema_id)
    assert ask(gateway, ca_certs=None, verify_certs=False).schema(schema_id).format == "AVRO"


def test_a_token_of_the_connection(open_gateway: Any, ask: Any, schema_id: int) -> None:
    gateway = open_gateway()
    gateway.lets_in = lambda authorization: authorization == "Bearer a token of a registry"
    assert ask(gateway, bearer_token="a token of a registry").schema(schema_id).format == "AVRO"
    with pytest.raises(RegistryRefusedError, match="HTTP 401"):
        ask(gateway, bearer_token="another token").schema(schema_id)


def test_a_token_of_a_login_server(open_gateway: Any, ask: Any, schema_id: int, tokens: TokenServer) -> None:
    gateway = open_gateway()

    def lets_in(authorization: str) -> bool:
        try:
            jwt.decode(
                authorization.removeprefix("Bearer "), tokens.key.public_key(), algorithms=["RS256"], audience=AUDIENCE
            )
        except jwt.InvalidTokenError:
            return False
        return True

    gateway.lets_in = lets_in
    oauth = {"oauth_token_url": f"{tokens.url}/token", "oauth_client_id": CLIENT_ID, "oauth_scope": "registry"}
    assert ask(gateway, **oauth, oauth_client_secret=CLIENT_SECRET).schema(schema_id).format == "AVRO"
    assert tokens.asked[0]["scope"] == "registry"


def test_a_login_server_that_refuses(open_gateway: Any, ask: Any, schema_id: int, tokens: TokenServer) -> None:
    oauth = {"oauth_token_url": f"{tokens.url}/token", "oauth_client_id": CLIENT_ID}
    with pytest.raises(RegistryRefusedError, match=r"gives no token: .*the client is not known") as refused:
        ask(open_gateway(), **oauth, oauth_client_secret="not the secret").schema(schema_id)
    assert "not the secret" not in str(refused.value)
    assert f"{tokens.url}/token" in str(refused.value)


def test_a_login_server_that_is_away(open_gateway: Any, ask: Any, schema_id: int, tokens: TokenServer) -> None:
    tokens.close()
    oauth = {"oauth_token_url": f"{tokens.url}/token", "oauth_client_id": CLIENT_ID}
    with pytest.raises(RegistryUnavailableError, match=f"{tokens.url}/token"):
        ask(open_gateway(), **oauth, oauth_client_secret=CLIENT_SECRET).schema(schema_id)


def test_a_login_server_of_a_private_authority(
    open_gateway: Any, ask: Any, schema_id: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ca, key = tmp_path / "login.pem", tmp_path / "login.key"
    write_certificate(ca, key, "login")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    tokens = TokenServer(context)
    oauth = {
        "oauth_token_url": f"{tokens.url}/token",
        "oauth_client_id": CLIENT_ID,
        "oauth_client_secret": CLIENT_SECRET,
    }
    gateway = open_gateway()
    try:
        with pytest.raises(RegistryUnavailableError, match=r"certificate verify failed.*SSL_CERT_FILE"):
            ask(gateway, **oauth).schema(schema_id)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        # The client of these settings was made without the variable, as in a process that had it not.
        assert ask(gateway, **oauth, oauth_scope="registry").schema(schema_id).format == "AVRO"
    finally:
        tokens.close()
