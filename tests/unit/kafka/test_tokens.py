"""Who makes the tokens of a connection, what is sent, and what is reported when there is none."""

from __future__ import annotations

import base64
import json
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import headrace
from headrace.connections import ALLOWLIST_VARIABLE, Connection
from headrace.kafka import tokens
from headrace.kafka.client import admin_config, connection_config, open_admin, open_consumer
from headrace.kafka.errors import ClientSettingError, TokenError
from headrace.kafka.tokens import TokenSource, with_tokens
from headrace.stream import KafkaInput

OAUTH = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
MSK = "b-1.demo.abcde1.c2.kafka.eu-west-1.amazonaws.com:9098,b-2.demo.abcde1.c2.kafka.eu-west-1.amazonaws.com:9098"
GOOGLE = "bootstrap.flights.europe-west1.managedkafka.acme.cloud.goog:9092"
QUIET = {"group.id": "g", "log_level": 0}
HERE = f"{__name__}.token"

made: list[str | None] = []
outcomes: list[Any] = []


def token(config: str | None) -> Any:
    """The callback that connections name here. Gives what ``outcomes`` has next."""
    made.append(config)
    outcome = outcomes.pop(0) if outcomes else ("a.b.c", time.time() + 300)
    if isinstance(outcome, Exception):
        raise outcome
    if isinstance(outcome, threading.Event):
        outcome.wait(60)
    return outcome


@pytest.fixture(autouse=True)
def _fresh() -> None:
    made.clear()
    outcomes.clear()


def settings(extra: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, Any]:
    connection = Connection("brokers", "kafka", extra={"bootstrap.servers": "127.0.0.1:1", **OAUTH, **extra})
    return connection_config(connection, {ALLOWLIST_VARIABLE: HERE} if environ is None else environ)


def source(extra: dict[str, Any], environ: dict[str, str] | None = None) -> TokenSource:
    found = settings(extra, environ)["oauth_cb"]
    assert isinstance(found, TokenSource)
    return found


@pytest.mark.parametrize("reference", [HERE, f"{__name__}:token"])
@pytest.mark.parametrize("listed", [HERE, f" other.function , {__name__}:token "])
def test_an_allowed_function_makes_tokens_wherever_it_is_pickled(reference: str, listed: str) -> None:
    """It makes them wherever the settings are pickled to."""
    found = source({"oauth_cb": reference}, {ALLOWLIST_VARIABLE: listed})
    copy = pickle.loads(pickle.dumps(found))  # noqa: S301 - made above
    assert copy.token("the config")[0] == "a.b.c"
    assert made == ["the config"]


@pytest.mark.parametrize("listed", ["", "other.function", __name__, f"{HERE}s"])
def test_a_function_that_is_not_allowed_is_not_imported(listed: str) -> None:
    with pytest.raises(ClientSettingError, match="callback_allowlist") as refused:
        settings({"oauth_cb": "antigravity.fly"}, {ALLOWLIST_VARIABLE: listed})
    assert "'antigravity.fly'" in str(refused.value) and "'brokers'" in str(refused.value)
    assert "antigravity" not in sys.modules


def test_the_allowed_functions_are_in_the_connections_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "kafka", "extra": {"bootstrap.servers": "b:1", **OAUTH, "oauth_cb": HERE}}
    file = tmp_path / "connections.json"
    file.write_text(json.dumps({"AIRFLOW_CONN_BROKERS": json.dumps(connection), ALLOWLIST_VARIABLE: HERE}))
    monkeypatch.setenv("HEADRACE_CONNECTIONS_FILE", str(file))
    config = admin_config(KafkaInput(connection="brokers", topics="clicks"))
    assert config["oauth_cb"] == TokenSource("brokers", "function", HERE)


@pytest.mark.parametrize(
    "extra", [{"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, {"security.protocol": "SSL"}]
)
def test_a_callback_without_its_mechanism_is_left_out(extra: dict[str, Any]) -> None:
    assert "oauth_cb" not in settings({"oauth_cb": HERE, **extra})


def test_librdkafka_makes_the_tokens_of_oidc() -> None:
    assert "oauth_cb" not in settings({"sasl.oauthbearer.method": "OIDC"})


def test_oauthbearer_without_a_source_of_tokens_is_refused() -> None:
    with pytest.raises(ClientSettingError, match="nothing makes its tokens"):
        settings({})


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (RuntimeError("the vault\nis sealed"), "RuntimeError: the vault is sealed"),
        (ModuleNotFoundError("No module named 'acme'", name="acme"), "No module named 'acme'"),
        (None, "returned a NoneType, not a tuple"),
        (("a.b.c",), "not a tuple of a token and its end"),
        ((b"a.b.c", time.time() + 300), "no text and number"),
        (("a.b.c", "tomorrow"), "no text and number"),
        (("a.b.c", time.time() + 300, None), "a principal that is no text"),
        (("a.b.c", time.time() - 60), r"the token ended \d+ s ago"),
    ],
    ids=["raises", "import", "none", "short", "bytes", "text", "principal", "ended"],
)
def test_no_client_is_made_without_a_token(outcome: Any, reason: str) -> None:
    """The reason names the connection and the host."""
    outcomes[:] = [outcome]
    config = settings({"oauth_cb": HERE})
    began = time.monotonic()
    with pytest.raises(TokenError, match=reason) as refused:
        open_admin(config)
    # confluent-kafka itself would wait 10 s, and not say why.
    assert time.monotonic() - began < 5
    assert "'brokers'" in str(refused.value) and socket.gethostname() in str(refused.value)
    assert HERE in str(refused.value)


def test_a_function_that_hangs_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that hangs is not called a second time meanwhile."""
    monkeypatch.setattr(tokens, "TOKEN_SECONDS", 0.2)
    hangs = threading.Event()
    outcomes[:] = [hangs]
    with pytest.raises(TokenError, match=r"it did not end within 0\.2 s"):
        source({"oauth_cb": HERE}).token(None)
    with pytest.raises(TokenError, match="an earlier call has not ended"):
        source({"oauth_cb": HERE}).token(None)
    assert len(made) == 1
    hangs.set()
    monkeypatch.setattr(tokens, "TOKEN_SECONDS", 30.0)
    assert source({"oauth_cb": HERE}).token(None)[0] == "a.b.c"


def test_a_client_begins_with_the_fetched_token_and_renews_it() -> None:
    outcomes[:] = [("first.b.c", time.time() + 2), ("second.b.c", time.time() + 300)]
    consumer = open_consumer({**settings({"oauth_cb": HERE, "sasl.oauthbearer.config": "x=y"}), **QUIET})
    try:
        assert made == ["x=y"]
        until = time.monotonic() + 30
        while len(made) == 1:
            assert time.monotonic() < until
            consumer.poll(0.05)
        assert made == ["x=y", "x=y"]
    finally:
        consumer.close()


def test_a_token_that_is_not_renewed_is_the_clients_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error has the reason."""
    outcomes[:] = [("first.b.c", time.time() + 2), RuntimeError("the vault is sealed")]
    heard: list[str] = []
    config = {**settings({"oauth_cb": HERE}), **QUIET, "error_cb": lambda error: heard.append(error.str())}
    consumer = open_consumer(config)
    try:
        until = time.monotonic() + 30
        while not any("the vault is sealed" in text for text in heard):
            assert time.monotonic() < until, heard
            consumer.poll(0.05)
    finally:
        consumer.close()
    assert "the vault is sealed" in caplog.text


def test_settings_without_a_source_of_tokens_stay_as_they_are() -> None:
    assert with_tokens({"bootstrap.servers": "b:1"}) == {"bootstrap.servers": "b:1"}


def test_clients_are_made_in_one_place() -> None:
    # Anywhere else, a client would have no tokens. The embedded broker asks for none.
    package = Path(headrace.__file__).parent
    call = re.compile(r"(?<![\w.])(Consumer|Producer|AdminClient)\(")
    makers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(call.search(line) for line in path.read_text().splitlines() if not line.startswith("class "))
    }
    assert makers == {"kafka/client.py", "devstack/kafka.py"}


# -- Amazon MSK ----------------------------------------------------------------------------------------------------


def test_msk_gets_a_connect_request_signed_for_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aws_msk_iam_sasl_signer")
    for name, value in {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "hush"}.items():
        monkeypatch.setenv(name, value)
    signed, ends_at = source({"bootstrap.servers": MSK}).token(None)
    url = urlsplit(base64.urlsafe_b64decode(signed + "=" * (-len(signed) % 4)).decode())
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert (url.scheme, url.netloc) == ("https", "kafka.eu-west-1.amazonaws.com")
    assert query["Action"] == "kafka-cluster:Connect"
    key, _, region, service, _ = query["X-Amz-Credential"].split("/")
    assert (key, region, service) == ("AKIDEXAMPLE", "eu-west-1", "kafka-cluster")
    assert re.fullmatch(r"[0-9a-f]{64}", query["X-Amz-Signature"])
    assert 0 < ends_at - time.time() <= int(query["X-Amz-Expires"])
    assert "hush" not in url.query


@pytest.mark.parametrize(
    ("servers", "region"),
    [
        (MSK, "eu-west-1"),
        ("boot-abcde1.c2.kafka-serverless.us-east-1.amazonaws.com:9098", "us-east-1"),
        ("b-1.demo.abcde1.c2.kafka.cn-north-1.amazonaws.com.cn:9098", "cn-north-1"),
    ],
)
def test_msk_is_known_by_its_servers(servers: str, region: str) -> None:
    assert source({"bootstrap.servers": servers}) == TokenSource("brokers", "msk", region)


@pytest.mark.parametrize("servers", [MSK, GOOGLE, "b.kafka.us-east-1.amazonaws.com.evil.example:9098", "b:1"])
def test_airflows_provider_knows_the_same_servers(servers: str) -> None:
    base = pytest.importorskip("airflow.providers.apache.kafka.hooks.base")
    if not hasattr(base, "MSK_BOOTSTRAP_SERVERS_REGEX"):
        pytest.skip("the provider is older than its support of MSK")
    theirs = base.MSK_BOOTSTRAP_SERVERS_REGEX.search(servers)
    try:
        ours = source({"bootstrap.servers": servers}, {})
    except ClientSettingError:
        assert theirs is None
    else:
        assert (None if theirs is None else theirs["region"]) == (ours.argument if ours.kind == "msk" else None)


def test_a_function_goes_before_the_signer_of_msk() -> None:
    assert source({"bootstrap.servers": MSK, "oauth_cb": HERE}).kind == "function"


def test_servers_that_only_look_like_those_of_msk_get_no_token() -> None:
    with pytest.raises(ClientSettingError, match="nothing makes its tokens"):
        settings({"bootstrap.servers": "b.kafka.us-east-1.amazonaws.com.evil.example:9098"})


def test_a_token_functions_error_is_repeated_without_secrets() -> None:
    outcomes[:] = [RuntimeError("401 from https://idp/token?client_secret=S3CR3T: {'access_token': 'S3CR3T'}")]
    with pytest.raises(
        TokenError, match=r"RuntimeError: 401 from https://idp/token.*test_tokens\.py, line \d+"
    ) as raised:
        with_tokens(settings({"oauth_cb": HERE}))
    assert "S3CR3T" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("servers", "module", "package"),
    [
        (MSK, "aws_msk_iam_sasl_signer", "aws-msk-iam-sasl-signer-python"),
        (GOOGLE, "google.auth", "google-auth"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_host(
    servers: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TokenError, match=f"the package {package} is not installed") as refused:
        source({"bootstrap.servers": servers}, {}).token(None)
    assert socket.gethostname() in str(refused.value)
    assert f"Install {package}" in str(refused.value.remedy)


# -- Google --------------------------------------------------------------------------------------------------------


class _Tokens(BaseHTTPRequestHandler):
    """Answers as Google's token endpoint does."""

    asked: ClassVar[list[dict[str, list[str]]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append(parse_qs(body))
        answer = json.dumps({"access_token": "ya29.access", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def google_key() -> Iterator[dict[str, str]]:
    """The key of a service account, whose tokens come from a server of this test."""
    _Tokens.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), _Tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    yield {
        "type": "service_account",
        "client_email": "headrace@acme.iam.gserviceaccount.com",
        "private_key": private.decode(),
        "token_uri": f"http://127.0.0.1:{server.server_port}/token",
    }
    server.shutdown()
    server.server_close()


def _as_dict(key: dict[str, str], _: Path) -> dict[str, Any]:
    return {"keyfile_dict": key}


def _as_text(key: dict[str, str], _: Path) -> dict[str, Any]:
    return {"extra__google_cloud_platform__keyfile_dict": json.dumps(key)}


def _as_file(key: dict[str, str], folder: Path) -> dict[str, Any]:
    (folder / "key.json").write_text(json.dumps(key))
    return {"key_path": str(folder / "key.json")}


@pytest.mark.parametrize("given", [_as_dict, _as_text, _as_file])
def test_google_gets_the_token_of_the_account_in_the_connection(
    google_key: dict[str, str], given: Callable[[dict[str, str], Path], dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("google.auth")
    connection = {"conn_type": "google_cloud_platform", "extra": given(google_key, tmp_path)}
    environ = {"AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT": json.dumps(connection)}
    found = source({"bootstrap.servers": GOOGLE}, environ)
    assert "PRIVATE KEY" not in repr(found)
    text, ends_at = pickle.loads(pickle.dumps(found)).token(None)  # noqa: S301 - made above
    header, claims, access = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in text.split("."))
    assert json.loads(header) == {"typ": "JWT", "alg": "GOOG_OAUTH2_TOKEN"}
    assert json.loads(claims)["sub"] == google_key["client_email"]
    assert (json.loads(claims)["iss"], json.loads(claims)["scope"]) == ("Google", "kafka")
    assert json.loads(claims)["exp"] == ends_at
    assert access == b"ya29.access"
    assert 3000 < ends_at - time.time() <= 3600
    (asked,) = _Tokens.asked
    assert asked["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]


def test_a_key_file_that_is_not_on_this_host_is_named(tmp_path: Path) -> None:
    connection = {"conn_type": "google_cloud_platform", "extra": {"key_path": str(tmp_path / "key.json")}}
    with pytest.raises(ClientSettingError, match=r"key\.json, cannot be read on this host"):
        settings({"bootstrap.servers": GOOGLE}, {"AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT": json.dumps(connection)})


def test_tokens_are_made_where_airflow_is_not_installed() -> None:
    # An executor unpickles the settings.
    code = """
import pickle, sys
sys.modules["airflow"] = None
found = pickle.load(sys.stdin.buffer)
print(found.token(None)[0])
assert not [name for name in sys.modules if name.startswith(("airflow.", "pyspark"))]
"""
    found = pickle.dumps(TokenSource("brokers", "function", "tests.unit.kafka.test_tokens.token"))
    run = subprocess.run([sys.executable, "-c", code], input=found, capture_output=True, check=False)
    assert run.stdout.split() == [b"a.b.c"], run.stderr
