"""What can be wrong with TLS to a search server: each fault has its own words and its own remedy."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.elasticsearch.errors import ElasticsearchRefusedError, IndexingOptionsError
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport, NoAnswerError, Node

DAY = datetime.timedelta(1)
Answer = Callable[[socket.socket], None]


def certificate_file(folder: Path, *, begins: int = -1, ends: int = 1, address: str = "127.0.0.1") -> str:
    """A key and the certificate that it has signed itself. ``begins`` and ``ends``: days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + begins * DAY)
        .not_valid_after(now + ends * DAY)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    held = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    file = folder / f"{address}_{begins}_{ends}.pem"
    file.write_bytes(held + certificate.public_bytes(serialization.Encoding.PEM))
    return str(file)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], int]]:
    listening: list[socket.socket] = []

    def start(answer: Answer) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def accept() -> None:
            while True:
                try:
                    connected, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer_one, args=(connected,), daemon=True).start()

        def answer_one(connected: socket.socket) -> None:
            try:
                with connected:
                    answer(connected)
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        port: int = server.getsockname()[1]
        return port

    yield start
    for server in listening:
        server.close()


def by_tls(file: str) -> Answer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    def answer(connected: socket.socket) -> None:
        with context.wrap_socket(connected, server_side=True) as encrypted:
            if encrypted.recv(65536):
                encrypted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    return answer


def asked(node: Node, **settings: Any) -> int:
    transport = ElasticsearchTransport(Cluster((node,), **settings), connections=1, timeout_seconds=5)
    try:
        return transport.request("GET", "/").status
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("made", "words", "remedy"),
    [
        ({"begins": -3, "ends": -1}, "has expired", "Renew the certificate"),
        ({"begins": 1, "ends": 3}, "not valid yet", "Check the clock"),
        ({"address": "127.0.0.2"}, "another host name", "a name of the certificate"),
    ],
)
def test_a_certificate_of_a_known_authority_has_its_own_fault(
    serve: Any, tmp_path: Path, made: dict[str, Any], words: str, remedy: str
) -> None:
    file = certificate_file(tmp_path, **made)
    node = Node("https", "127.0.0.1", serve(by_tls(file)))
    with pytest.raises(ElasticsearchRefusedError, match=words) as raised:
        asked(node, ca_certs=file)
    assert remedy in str(raised.value.remedy) and "ca_certs" not in str(raised.value)


def test_another_authority_is_named_with_its_file(serve: Any, tmp_path: Path) -> None:
    node = Node("https", "127.0.0.1", serve(by_tls(certificate_file(tmp_path))))
    other = certificate_file(tmp_path, ends=2)
    with pytest.raises(ElasticsearchRefusedError, match=f"authority that is not trusted.*{other}") as raised:
        asked(node, ca_certs=other)
    assert "Give the certificate of the authority" in str(raised.value.remedy)


def plaintext(connected: socket.socket) -> None:
    connected.recv(65536)
    connected.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_a_port_without_tls_is_named(serve: Any) -> None:
    node = Node("https", "127.0.0.1", serve(plaintext))
    with pytest.raises(ElasticsearchRefusedError, match=r"does not answer by TLS.*schema to http"):
        asked(node)


def closes(file: str) -> Answer:
    """As Elasticsearch does: it closes a connection on which it gets no TLS."""
    tls = by_tls(file)

    def answer(connected: socket.socket) -> None:
        if connected.recv(1, socket.MSG_PEEK) == b"\x16":
            tls(connected)

    return answer


def alerts(_: str) -> Answer:
    """As a server of Go's does: it answers in plaintext."""

    def answer(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.")

    return answer


@pytest.mark.parametrize("kind", [closes, by_tls, alerts])
def test_plaintext_at_a_tls_port_is_named(serve: Any, tmp_path: Path, kind: Callable[[str], Answer]) -> None:
    node = Node("http", "127.0.0.1", serve(kind(certificate_file(tmp_path))))
    with pytest.raises(ElasticsearchRefusedError, match=r"speaks TLS on this port.*https"):
        asked(node)


def test_a_server_that_closes_and_speaks_no_tls_has_no_tls_fault(serve: Any) -> None:
    node = Node("http", "127.0.0.1", serve(lambda _: None))
    with pytest.raises(NoAnswerError):
        asked(node)


@pytest.mark.parametrize("name", ["ca_certs", "client_cert", "client_key"])
def test_a_missing_file_is_named_with_its_path(tmp_path: Path, name: str) -> None:
    missing = str(tmp_path / "missing.pem")
    files = {"client_cert": certificate_file(tmp_path), name: missing}
    with pytest.raises(IndexingOptionsError, match=f"{missing} \\({name} .*No such file"):
        asked(Node("https", "127.0.0.1", 9), **files)


def test_a_file_that_is_no_certificate_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(IndexingOptionsError, match=r"text\.pem \(ca_certs .*no certificate in PEM"):
        asked(Node("https", "127.0.0.1", 9), ca_certs=str(tmp_path / "text.pem"))
