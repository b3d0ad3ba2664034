"""What is reported of a client that no broker lets in: the cause, its remedy, and how long."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.unit.receiver.waiting import eventually

from headrace.kafka.client import open_admin, open_consumer
from headrace.kafka.client_errors import KeptError, explained
from headrace.kafka.errors import ClientSettingError

HERE = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
UNVERIFIED = "SSL handshake failed: error:0A000086:SSL routines::certificate verify failed: broker certificate could "
TOKEN = KafkaError(KafkaError._AUTHENTICATION, "Failed to acquire SASL OAUTHBEARER token: HTTP 401 invalid_client")
TIMED_OUT = KafkaError(KafkaError._TIMED_OUT, "sasl_ssl://b:1/1: Connection setup timed out in state CONNECT")
ALL_DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")
GENERIC = [
    TIMED_OUT,
    ALL_DOWN,
    KafkaError(KafkaError._TRANSPORT, "b:1/1: Connect to ipv4#1.2.3.4:1 failed: Connection refused"),
    KafkaError(KafkaError.REQUEST_TIMED_OUT, "no answer"),
]


def make_certificate(path: Path, name: x509.GeneralName, *, days: int) -> Path:
    """A key and its own certificate, in one file, that ends in ``days``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(30))
        .not_valid_after(now + datetime.timedelta(days))
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def serve() -> Iterator[Callable[[Path], int]]:
    """Starts a TLS server with a certificate; returns its port."""
    servers: list[socket.socket] = []

    def start(certificate: Path) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def shake_hands() -> None:
            try:
                accepted, _ = server.accept()
                with accepted, context.wrap_socket(accepted, server_side=True):
                    pass
            except OSError:
                pass

        threading.Thread(target=shake_hands, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("later", GENERIC, ids=lambda error: error.name())
def test_a_refused_log_in_is_not_hidden_by_a_generic_error(later: KafkaError) -> None:
    last = KeptError()
    for error in (ALL_DOWN, TOKEN, later, ALL_DOWN):
        last.note(error)
    assert last.text is not None
    assert "invalid_client" in last.text
    assert last.is_refused
    last.connected()
    assert last.text is None
    assert not last.is_refused


def test_another_refusal_replaces_the_first() -> None:
    last = KeptError()
    last.note(TOKEN)
    last.note(KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error: Authentication failed"))
    assert last.text is not None
    assert "the broker refuses the log-in" in last.text


def test_all_brokers_down_says_less_than_the_error_of_one() -> None:
    last = KeptError()
    last.note(GENERIC[2])
    last.note(ALL_DOWN)
    assert last.text is not None
    assert "Connection refused" in last.text


def test_a_failed_renewal_is_shown_again_after_a_lost_connection() -> None:
    now = [0.0]
    last = KeptError(now=lambda: now[0])
    last.note(TOKEN)
    last.connected()
    now[0] = 60.0
    last.note(TIMED_OUT)
    assert last.text is not None
    assert "timed out" in last.text
    assert "invalid_client" in last.text
    last.connected()
    now[0] = 3600.0
    last.note(TIMED_OUT)
    assert last.text is not None
    assert "invalid_client" not in last.text


@pytest.mark.parametrize(
    ("code", "text", "words", "remedy"),
    [
        (-169, "Unsupported SASL mechanism: broker's supported mechanisms: PLAIN", "SASL mechanism", "sasl.mechanism"),
        (-169, "SASL authentication error: Authentication failed", "refuses the log-in", "password"),
        (-169, TOKEN.str(), "no token", "token endpoint"),
        (-195, "Receive failed: tlsv13 alert certificate required: SSL alert number 116", "client's cert", "ssl.key"),
        (-195, "Receive failed: tlsv1 alert unknown ca: SSL alert number 48", "client's cert", "ssl.key"),
        (
            -195,
            "ssl://b:1/1: Disconnected: connection reset by peer (after 0ms in state SSL_HANDSHAKE)",
            "client uses TLS",
            "PLAINTEXT",
        ),
        (-181, "SSL handshake failed: error: SSL routines::wrong version number", "client uses TLS", "PLAINTEXT"),
    ],
)
def test_each_cause_has_its_own_words_and_remedy(code: int, text: str, words: str, remedy: str) -> None:
    known = explained(KafkaError(code, text))
    assert known.is_real
    assert words in known.text
    assert remedy in known.remedy


@pytest.mark.parametrize(
    ("name", "days", "trusted", "reported"),
    [
        (HERE, -1, True, ("has expired", "Renew")),
        (x509.DNSName("other"), 9, True, ("another host name", "Take a name")),
        (HERE, 9, False, ("no authority of", "ssl.ca.location")),
    ],
    ids=["expired", "host name", "authority"],
)
def test_a_certificate_that_fails_is_examined(
    serve: Callable[[Path], int],
    tmp_path: Path,
    *,
    name: x509.GeneralName,
    days: int,
    trusted: bool,
    reported: tuple[str, str],
) -> None:
    own = make_certificate(tmp_path / "own.pem", name, days=days)
    authority = own if trusted else make_certificate(tmp_path / "another.pem", name, days=days)
    port = serve(own)
    last = KeptError({"security.protocol": "ssl", "ssl.ca.location": str(authority)})
    last.note(KafkaError(KafkaError._SSL, f"ssl://127.0.0.1:{port}/bootstrap: {UNVERIFIED}"))
    # At once, and without what the handshake shows, which goes on meanwhile.
    assert reported[0] not in str(last.text)
    eventually(lambda: reported[0] in str(last.text))
    known = last.examined()
    assert known is not None
    assert reported[0] in known.text
    assert reported[1] in known.remedy


def test_a_client_without_tls_at_a_port_with_tls(serve: Callable[[Path], int], tmp_path: Path) -> None:
    port = serve(make_certificate(tmp_path / "own.pem", HERE, days=9))
    last = KeptError({"bootstrap.servers": f"127.0.0.1:{port}"})
    last.note(ALL_DOWN)
    known = last.examined()
    assert known is not None
    assert "speaks TLS" in known.text
    assert "security.protocol" in known.remedy


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_a_missing_file_is_named_with_its_path_and_host(name: str, tmp_path: Path) -> None:
    path = tmp_path / "gone.pem"
    config = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SSL", name: str(path)}
    for make in (open_admin, lambda config: open_consumer({**config, "group.id": "g"})):
        with pytest.raises(ClientSettingError) as raised:
            make(config)
        assert str(path) in raised.value.what
        assert socket.gethostname() in raised.value.what
