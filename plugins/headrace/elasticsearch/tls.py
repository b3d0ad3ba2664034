"""TLS to a node: its context, trust by a fingerprint, and the words for what can be wrong with it.

Each cause has its own remedy: an expired certificate is not cured by another authority, and a server that speaks no TLS
not by another certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import threading
from typing import Any, NamedTuple

import urllib3
from urllib3.exceptions import ConnectTimeoutError, SSLError

from headrace.elasticsearch.errors import IndexingOptionsError

_HASHES = {32: "md5", 40: "sha1", 64: "sha256"}


class TlsFiles(NamedTuple):
    """The files of a connection's extra, by their names there."""

    ca_certs: str | None
    client_cert: str | None
    client_key: str | None


class TlsFault(NamedTuple):
    """What is wrong, to follow the server's address, and what to do."""

    what: str
    remedy: str


# OpenSSL's X509_V_ERR_* codes.
_NAMES = (62, 63, 64)
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21, 24)
_NO_TLS = ("wrong version number", "wrong_version_number", "http request", "packet length too long", "record layer")
_OLD_TLS = ("unsupported protocol", "unsupported_protocol", "protocol version", "protocol_version")
_CLIENT = ("certificate required", "certificate_required", "bad certificate", "bad_certificate", "alert unknown ca")


def tls_fault(error: BaseException, ca_certs: str | None) -> TlsFault | None:
    """What an error of a TLS connection says is wrong; None if it may pass, such as a connection that was cut."""
    verification = _verification(error)
    if verification is not None:
        what, remedy = _of_certificate(verification.verify_code, ca_certs)
        return TlsFault(f"shows {what}: {error}", remedy)
    return _handshake_fault(error, str(error).lower())


def _of_certificate(code: int, ca_certs: str | None) -> tuple[str, str]:
    """What is wrong with the certificate, by OpenSSL's code, and what to do."""
    if code in _NAMES:
        return (
            "a certificate for another host name",
            "Write the host in the connection as a name of the certificate, or add this name to the certificate.",
        )
    if code in _UNKNOWN_AUTHORITY:
        given = f"The file {ca_certs} (ca_certs) has another one's. " if ca_certs else ""
        return (
            "a certificate of an authority that is not trusted",
            f"{given}Give the certificate of the authority that signed the server's as ca_certs in the connection's "
            "extra.",
        )
    return _OF_CODE.get(code, ("a certificate that cannot be used", "Correct the certificate on the server."))


_OF_CODE = {
    9: ("a certificate that is not valid yet", "Check the clock of this host and the dates of the certificate."),
    10: (
        "a certificate that has expired, or one of its authorities has",
        "Renew the certificate on the server, and check the clock of this host.",
    ),
    23: ("a certificate that was revoked", "Renew the certificate on the server."),
}


def _handshake_fault(error: BaseException, text: str) -> TlsFault | None:
    if "fingerprint" in text:
        return TlsFault(
            f"shows a certificate that is not trusted: {error}",
            "Compare ssl_assert_fingerprint in the connection's extra with the certificate that the server should "
            "have; or give its authority's certificate as ca_certs instead.",
        )
    if any(sign in text for sign in _NO_TLS):
        return TlsFault(
            f"does not answer by TLS: {error}",
            "Name the port on which the server speaks TLS; or set the schema to http if it has no TLS.",
        )
    if any(sign in text for sign in _OLD_TLS):
        return TlsFault(f"speaks no TLS of version 1.2 or later: {error}", "Allow TLS 1.2 or 1.3 on the server.")
    if any(sign in text for sign in _CLIENT):
        return TlsFault(
            f"does not accept the client's certificate, or its lack: {error}",
            "Give a certificate that the server trusts as client_cert and client_key in the connection's extra.",
        )
    return None


def _verification(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The error of the certificate's verification in a chain of errors."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        inner = next((part for part in error.args if isinstance(part, BaseException)), None)
        error, seen = inner or error.__cause__ or error.__context__, seen + 1
    return None


PLAINTEXT_REFUSED = TlsFault(
    "speaks TLS on this port, and the connection asks for http",
    "Set the schema of the connection to https, or write the host as https://….",
)
# What servers answer to plaintext at a TLS port: nginx, Go, Jetty.
_PLAINTEXT_AT_TLS = (b"HTTP request was sent to HTTPS", b"HTTP request to an HTTPS", b"speaking plain HTTP to an SSL")


def says_plaintext_at_tls(status: int, body: bytes) -> bool:
    """Whether an answer says that its port is one of TLS."""
    return status == 400 and any(sign in body[:2000] for sign in _PLAINTEXT_AT_TLS)


def speaks_tls(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether a server that does not answer in plaintext does by TLS. Nothing is sent to it but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout_seconds) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except (OSError, ValueError):
        return False


def tls_context(files: TlsFiles, *, verify_certs: bool, by_fingerprint: bool, where: object) -> ssl.SSLContext:
    """The context of connections to a node. Raises IndexingOptionsError that names the file that cannot be used."""
    for name, path in files._asdict().items():
        if path:
            _check_readable(name, path, where)
    # By a fingerprint no authority is trusted: the certificate that has it becomes the only one. Otherwise the system's
    # authorities are trusted besides those of ca_certs, or of certifi.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if by_fingerprint else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if by_fingerprint or not verify_certs:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif files.ca_certs:
        try:
            context.load_verify_locations(files.ca_certs)
        except (OSError, ValueError) as error:
            raise _unusable("ca_certs", files.ca_certs, where, f"it has no certificate in PEM ({error})") from error
    else:
        import certifi

        context.load_verify_locations(certifi.where())
    if files.client_cert:
        try:
            context.load_cert_chain(files.client_cert, files.client_key)
        except (OSError, ValueError) as error:
            key = files.client_key or files.client_cert
            why = f"it is no certificate in PEM, or {key} is not its key ({error})"
            raise _unusable("client_cert", files.client_cert, where, why) from error
    return context


def _check_readable(name: str, path: str, where: object) -> None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the path is a user's text
            file.read(1)
    except (OSError, ValueError) as error:
        # OpenSSL's error has no path.
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unusable(name, path, where, why) from error


def _unusable(name: str, path: str, where: object, why: str) -> IndexingOptionsError:
    return IndexingOptionsError(
        f"The file {path} ({name} of the connection to {where}) cannot be used on host {socket.gethostname()}: {why}.",
        remedy="The files ca_certs, client_cert and client_key have to be on every host on which batches and "
        "executors run.",
    )


class FingerprintPool(urllib3.HTTPSConnectionPool):
    """Trusts the node if a certificate of its chain has the fingerprint: its own, or that of its authority.

    Elasticsearch prints the fingerprint of its authority at its first start; urllib3 compares only the node's own. A
    node may send a certificate that has not signed its own. So a first handshake only finds the certificate, and every
    connection that sends a request is verified against it. Names and dates are not checked.
    """

    def __init__(
        self, host: str, fingerprint: str, unverified: ssl.SSLContext, trusting: ssl.SSLContext, **settings: Any
    ) -> None:
        self._fingerprint = fingerprint.replace(":", "").lower()
        if len(self._fingerprint) not in _HASHES or not set(self._fingerprint) <= set("0123456789abcdef"):
            raise IndexingOptionsError(
                "'ssl_assert_fingerprint' in the connection's extra is not a fingerprint.",
                remedy="Give the SHA-256 of a certificate as 64 hexadecimal digits.",
            )
        self._unverified = unverified
        self._trusting = trusting
        self._found = False
        self._finding = threading.Lock()
        super().__init__(host, ssl_context=trusting, cert_reqs="CERT_REQUIRED", assert_hostname=False, **settings)

    def _validate_conn(self, conn: Any) -> None:
        """Connect. Called before each request."""
        if conn.is_closed and not self._found:
            if not self._finding.acquire(timeout=conn.timeout):
                raise ConnectTimeoutError(conn, f"no TLS handshake with {self.host} within {conn.timeout} s")
            try:
                if not self._found:
                    self._find_certificate(conn.timeout)
                    self._found = True
            finally:
                self._finding.release()
        super()._validate_conn(conn)

    def _find_certificate(self, timeout: Any) -> None:
        """Make the certificate with the fingerprint the only one that is trusted. Raises SSLError or OSError."""
        with (
            socket.create_connection((self.host, self.port or 443), timeout) as plain,
            self._unverified.wrap_socket(plain, server_hostname=self.host) as encrypted,
        ):
            chain = _chain(encrypted)
        algorithm = _HASHES[len(self._fingerprint)]
        for certificate in chain:
            if hmac.compare_digest(hashlib.new(algorithm, certificate).hexdigest(), self._fingerprint):
                self._trusting.load_verify_locations(cadata=certificate)
                self._trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
                self._trusting.verify_mode = ssl.CERT_REQUIRED
                return
        fingerprints = ", ".join(hashlib.new(algorithm, certificate).hexdigest() for certificate in chain)
        raise SSLError(f"no certificate of the node has the fingerprint {self._fingerprint}; they have {fingerprints}")


# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name.
_NO_CHECK_TIME = 0x200000
# OpenSSL's X509_FILETYPE_ASN1.
_DER = 2


def _chain(encrypted: ssl.SSLSocket) -> list[bytes]:
    """The certificates that the node has sent, in DER."""
    reading: Any = encrypted
    if hasattr(reading, "get_unverified_chain"):
        return list(reading.get_unverified_chain())
    # Python before 3.13 has it only there.
    return [certificate.public_bytes(_DER) for certificate in reading._sslobj.get_unverified_chain()]
