"""The transport against small HTTP servers on loopback, with and without TLS."""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import ipaddress
import json
import logging
import pickle
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.connections import Connection, ConnectionTypeError, from_text
from headrace.elasticsearch import transport as module
from headrace.elasticsearch.errors import ElasticsearchRefusedError, IndexingOptionsError
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Node
from headrace.stream import ElasticsearchOutput

Seen = list[tuple[str, str, dict[str, str], bytes]]


class Server:
    """Answers every request with ``status``, and remembers it."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.seen: Seen = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.seen.append((self.command, self.path, headers, body))
                self.send_response(server.status)
                for name, value in {**server.headers, "content-length": "2"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign,assignment]
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.node = Node("http" if context is None else "https", "127.0.0.1", self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(context: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(context))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def post(cluster: Cluster, path: str = "/clicks/_bulk?x=1", body: bytes | None = b"{}\n") -> int:
    transport = ElasticsearchTransport(cluster, connections=1, timeout_seconds=5)
    try:
        return transport.request("POST", path, body).status
    finally:
        transport.close()


def unused_node() -> Node:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return Node("http", "127.0.0.1", unused.getsockname()[1])


def test_a_body_is_sent_unchanged_with_prefix_and_credentials(serve: Any) -> None:
    server = serve()
    node = Node("http", "127.0.0.1", server.node.port, "/es")
    assert post(Cluster((node,), authorization="ApiKey secret")) == 200
    ((method, path, headers, body),) = server.seen
    assert (method, path, body) == ("POST", "/es/clicks/_bulk?x=1", b"{}\n")
    assert (headers["content-type"], headers["authorization"]) == ("application/x-ndjson", "ApiKey secret")


def test_a_body_is_compressed_if_the_connection_says_so(serve: Any) -> None:
    server = serve()
    post(Cluster((server.node,), http_compress=True), "/clicks/_mget")
    ((_, _, headers, body),) = server.seen
    assert (gzip.decompress(body), headers["content-encoding"]) == (b"{}\n", "gzip")
    assert (headers["content-type"], headers["accept-encoding"]) == ("application/json", "gzip")


def test_a_redirect_is_an_answer_and_credentials_go_nowhere_else(serve: Any) -> None:
    server, other = serve(), serve()
    server.status, server.headers = 307, {"location": str(other.node)}
    assert post(Cluster((server.node,), authorization="ApiKey secret")) == 307
    assert other.seen == []


def test_an_error_names_the_address_and_the_cause() -> None:
    node = unused_node()
    with pytest.raises(NoAnswerError, match=f"no answer from {node}: .*refused"):
        post(Cluster((node,)))


def test_a_request_is_over_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = Node("http", "127.0.0.1", silent.getsockname()[1])
        transport = ElasticsearchTransport(Cluster((node,)), connections=1, timeout_seconds=0.2)
        with pytest.raises(NoAnswerError, match=r"timed out|had not ended"):
            transport.request("GET", "/")
        transport.close()


def test_nodes_take_turns_and_a_dead_one_is_left_out_ever_longer(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    first, second, dead = serve(), serve(), serve()
    dead.status = 503
    cluster = Cluster((first.node, second.node, dead.node))
    transport = ElasticsearchTransport(cluster, connections=1, timeout_seconds=5)

    def asked_after(seconds: float) -> int:
        """How often the dead node is asked in six requests after this time."""
        now[0] += seconds
        before = len(dead.seen)
        for _ in range(6):
            transport.request("GET", "/")
        return len(dead.seen) - before

    assert asked_after(0) == 1
    assert asked_after(0.9) == 0
    assert asked_after(0.2) == 1
    assert asked_after(1.9) == 0
    assert asked_after(0.2) == 1
    dead.status = 200
    assert asked_after(3.9) == 0
    assert asked_after(0.2) == 2, "it takes its turn again"
    assert abs(len(first.seen) - len(second.seen)) <= 8
    transport.close()


def test_of_dead_nodes_the_one_that_may_be_back_first_is_asked(serve: Any) -> None:
    server = serve()
    server.status = 502
    transport = ElasticsearchTransport(Cluster((server.node, unused_node())), connections=1, timeout_seconds=5)
    for _ in range(4):
        try:
            transport.request("GET", "/")
        except NoAnswerError:
            continue
    assert len(server.seen) >= 1
    transport.close()


class Authority:
    """An authority of certificates, and the context of a server with a certificate for 127.0.0.1 that it signed."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = _certificate(name, self.key, name, self.key, authority=True)
        self.file = folder / f"{id(self)}.pem"
        self.file.write_bytes(_pem(self.certificate))
        self.fingerprint = _fingerprint(self.certificate)

    def server(self, *, signed_by: Any = None) -> tuple[ssl.SSLContext, str]:
        """The context of a server that sends the authority's certificate too, and its own certificate's fingerprint."""
        chain, certificate = self.chain(signed_by=signed_by)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        return context, _fingerprint(certificate)

    def chain(self, *, signed_by: Any = None) -> tuple[Path, x509.Certificate]:
        """A file with the key and the certificates of such a server, and its own certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate("node", key, "authority", signed_by or self.key)
        chain = self._folder / f"{id(key)}.pem"
        chain.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + _pem(certificate)
            + _pem(self.certificate)
        )
        return chain, certificate


def _certificate(name: str, key: Any, issuer: str, issuer_key: Any, *, authority: bool = False) -> x509.Certificate:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=20000))
        .not_valid_after(now + datetime.timedelta(days=20000))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        # From 3.13 on, Python demands these.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if authority:
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        signs = x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)
        builder = builder.add_extension(signs, critical=True)
    if not authority:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _fingerprint(certificate: x509.Certificate) -> str:
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_certificate_of_a_known_authority_is_trusted(serve: Any, authority: Authority) -> None:
    server = serve(authority.server()[0])
    assert post(Cluster((server.node,), ca_certs=str(authority.file))) == 200


def test_a_certificate_of_an_unknown_authority_is_refused(serve: Any, authority: Authority) -> None:
    server = serve(authority.server()[0])
    with pytest.raises(
        ElasticsearchRefusedError, match=f"at {server.node} shows a certificate of an authority.*ca_certs"
    ):
        post(Cluster((server.node,)))
    assert server.seen == []


def test_verify_certs_false_trusts_any_certificate(serve: Any, authority: Authority) -> None:
    server = serve(authority.server()[0])
    with pytest.warns(match="Unverified HTTPS request"):
        assert post(Cluster((server.node,), verify_certs=False)) == 200


@pytest.mark.parametrize("of", ["the node", "the authority"])
def test_a_fingerprint_is_of_the_node_or_of_its_authority(serve: Any, authority: Authority, of: str) -> None:
    context, own = authority.server()
    server = serve(context)
    fingerprint = own if of == "the node" else authority.fingerprint
    colons = ":".join(fingerprint[place : place + 2] for place in range(0, 64, 2)).upper()
    assert post(Cluster((server.node,), ssl_assert_fingerprint=colons)) == 200


def test_another_fingerprint_is_refused_at_once(serve: Any, authority: Authority) -> None:
    server = serve(authority.server()[0])
    with pytest.raises(ElasticsearchRefusedError, match="no certificate of the node has the fingerprint 0000"):
        post(Cluster((server.node,), ssl_assert_fingerprint="0" * 64))
    assert server.seen == []


def test_a_server_that_only_sends_the_authoritys_is_not_trusted(serve: Any, authority: Authority) -> None:
    """Its own certificate was signed by another key, so anyone could have made it."""
    context, _ = authority.server(signed_by=ec.generate_private_key(ec.SECP256R1()))
    server = serve(context)
    with pytest.raises(ElasticsearchRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
        post(Cluster((server.node,), ssl_assert_fingerprint=authority.fingerprint))
    assert server.seen == []


def test_a_fingerprint_excludes_every_other_authority_later_too(
    serve: Any, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between may let the first handshake pass, and answer the next one with a publicly signed certificate."""
    public = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(public.file))
    changing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    changing.load_cert_chain(authority.chain()[0])
    server = serve(changing)
    server.headers = {"connection": "close"}
    transport = ElasticsearchTransport(
        Cluster((server.node,), ssl_assert_fingerprint=authority.fingerprint), connections=1, timeout_seconds=5
    )
    assert transport.request("POST", "/", b"{}").status == 200
    changing.load_cert_chain(public.chain()[0])
    with pytest.raises(ElasticsearchRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
        transport.request("POST", "/", b"{}")
    assert len(server.seen) == 1
    transport.close()


def test_a_client_certificate_is_sent(serve: Any, authority: Authority, tmp_path: Path) -> None:
    context, _ = authority.server()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.file)
    server = serve(context)
    # The server's alert, or the cut connection, whichever comes first.
    with pytest.raises((ElasticsearchRefusedError, NoAnswerError)):
        post(Cluster((server.node,), ca_certs=str(authority.file)))
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "client.pem").write_bytes(_pem(_certificate("client", key, "authority", authority.key)))
    (tmp_path / "client.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    ours = {"client_cert": str(tmp_path / "client.pem"), "client_key": str(tmp_path / "client.key")}
    assert post(Cluster((server.node,), ca_certs=str(authority.file), **ours)) == 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ca_certs": "/nowhere/ca.pem"}, "cannot be used"),
        ({"client_cert": "/nowhere/client.pem"}, "cannot be used"),
        ({"ssl_assert_fingerprint": "abc"}, "not a fingerprint"),
        ({"ssl_assert_fingerprint": "x" * 64}, "not a fingerprint"),
    ],
)
def test_impossible_tls_settings_are_refused_before_a_request(settings: Any, says: str) -> None:
    with pytest.raises(IndexingOptionsError, match=says):
        ElasticsearchTransport(Cluster((Node("https", "a", 1),), **settings), connections=1, timeout_seconds=1)


def connection(**fields: object) -> Connection:
    return Connection(**{"id": "es", "conn_type": "elasticsearch", "host": "es.example", "port": 9200, **fields})  # type: ignore[arg-type]


def test_hosts_are_urls() -> None:
    output = ElasticsearchOutput(hosts=("http://a", "b:9201", "https://c:9443/prefix/"), index="i")
    assert Cluster.of(output).nodes == (
        Node("http", "a", 80),
        Node("http", "b", 9201),
        Node("https", "c", 9443, "/prefix"),
    )


def test_a_connection_of_airflows_opensearch_provider_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    module._log_aside.cache_clear()
    extra = {"use_ssl": "true", "verify_certs": False, "url_prefix": "/search", "timeout": 30, "http_compress": True}
    with caplog.at_level(logging.INFO):
        cluster = Cluster.from_connection(connection(conn_type="opensearch", extra=extra))
    assert cluster.nodes == (Node("https", "es.example", 9200, "/search"),)
    assert (cluster.verify_certs, cluster.http_compress) == (False, True)
    assert [record.getMessage() for record in caplog.records] == [
        "timeout of connection 'es' is left aside: headrace sets its own"
    ]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"verify_cert": False}, "has 'verify_cert'. Did you mean verify_certs?"),
        ({"headers": {"Authorization": "Bearer hunter2"}}, "has 'headers'. It may have"),
        ({"use_ssl": "perhaps"}, "'use_ssl' in the extra of connection 'es' is neither true nor false"),
    ],
)
def test_what_a_connection_may_not_have_is_named(extra: dict[str, object], says: str) -> None:
    with pytest.raises(IndexingOptionsError) as refused:
        Cluster.from_connection(connection(extra=extra))
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)


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
        ('{"conn_type": "https", "host": "es.example", "login": "me"}', Node("https", "es.example", 443)),
        ('{"conn_type": "elasticsearch", "host": "es.example", "schema": "HTTPS"}', Node("https", "es.example", 443)),
        ('{"host": "es.example", "schema": "https"}', Node("https", "es.example", 443)),
    ],
)
def test_who_asks_for_https_gets_it(text: str, node: Node) -> None:
    connection = from_text("es", text)
    assert Cluster.from_connection(connection).nodes == (node,)
    assert connection.login in ("me", None)


@pytest.mark.parametrize(
    ("fields", "node"),
    [
        ({"schema": "https"}, Node("https", "es.example", 443)),
        ({"schema": "http"}, Node("http", "es.example", 80)),
        ({"conn_type": "https"}, Node("https", "es.example", 443)),
        ({"host": "https://es.example"}, Node("https", "es.example", 443)),
        ({"host": "http://es.example/es"}, Node("http", "es.example", 80, "/es")),
        ({"host": "https://es.example", "port": 9200}, Node("https", "es.example", 9200)),
        ({"host": "es.example:9200"}, Node("http", "es.example", 9200)),
        ({"port": 9200}, Node("http", "es.example", 9200)),
    ],
)
def test_an_address_without_a_port_has_that_of_every_url(fields: dict[str, Any], node: Node) -> None:
    assert Cluster.from_connection(connection(**{"port": None, **fields})).nodes == (node,)


@pytest.mark.parametrize("host", ["es.example", "es.example:9200,es2.example"])
def test_a_host_without_a_port_and_a_scheme_is_refused(host: str) -> None:
    with pytest.raises(IndexingOptionsError, match=r"es2?\.example:9200 .*no longer assumed"):
        Cluster.from_connection(connection(host=host, port=None))
    with pytest.raises(IndexingOptionsError, match="neither a port nor"):
        Cluster.of(ElasticsearchOutput(hosts=tuple(host.split(",")), index="i"))


def test_a_server_that_is_not_at_an_assumed_port_is_explained() -> None:
    node = Node("http", "127.0.0.1", 9, port_assumed=True)
    with pytest.raises(NoAnswerError, match=r"port 9 is that of http.*9200"):
        post(Cluster((node,)))


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
        connection(extra={"node_class": "requests"}),
        connection(extra={"verify_certs": "perhaps"}),
        connection(login="me", extra={"api_key": "k"}),
        connection(host="http://me:hunter2@a"),
    ],
)
def test_unknown_or_invalid_connection_settings_are_refused(wrong: Connection) -> None:
    with pytest.raises(IndexingOptionsError) as caught:
        Cluster.from_connection(wrong)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("0", 0, 0), (" 17 ", 17, 17), ("9" * 400, 1e11, 1e13), ("an hour from now", 3500, 3600), ("a year ago", 0, 0)],
)
def test_an_answer_says_when_to_ask_again(serve: Any, header: str, least: float, most: float) -> None:
    server = serve()
    now = datetime.datetime.now(datetime.UTC)
    times = {"an hour from now": datetime.timedelta(hours=1), "a year ago": datetime.timedelta(days=-365)}
    server.headers["Retry-After"] = format_datetime(now + times[header], usegmt=True) if header in times else header
    transport = ElasticsearchTransport(Cluster((server.node,)), connections=1, timeout_seconds=5)
    answer = transport.request("GET", "/")
    transport.close()
    assert answer.retry_after_seconds is not None
    assert least <= answer.retry_after_seconds <= most
    assert 0 < answer.seconds < 5


@pytest.mark.parametrize("header", [None, "", "soon", "-5", "1.5", "\u00b2"])
def test_an_answer_without_a_time_says_none(serve: Any, header: str | None) -> None:
    server = serve()
    if header is not None:
        server.headers["Retry-After"] = header
    transport = ElasticsearchTransport(Cluster((server.node,)), connections=1, timeout_seconds=5)
    assert transport.request("GET", "/").retry_after_seconds is None
    transport.close()
