"""What is wrong between a client and its brokers: librdkafka's errors in words, each with its remedy.

librdkafka reports a refusal once, and then only that time is over or that all brokers are down. So each client keeps
its last real error in a `KeptError`. Of a certificate that fails it does not say why, and of a plaintext client at a
port for TLS nothing at all; `KeptError.examined` asks the server itself, by one TLS handshake.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError

# librdkafka puts times and counts in its errors, which make the text of the same error differ each time.
_COUNTED = re.compile(r" \(after \d+ms in state [A-Z_]+(, \d+ identical error\(s\) suppressed)?\)")

# These say less than the error of one broker: any other error replaces them, and they replace no other.
_GENERIC = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
    }
)
_REFUSED = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
SERVERS_REMEDY = "See to the servers, and to the address and the security settings of the connection."
_UNVERIFIED = "certificate verify failed"
_ADDRESS = re.compile(r"(?:\w+://)?(\[[^\]]+\]|[^\s:/\[\]]+):(\d+)")
_PROBE_SECONDS = 2.0
_TOKENLESS = "there is no token"
# librdkafka reports a failed renewal once, and its success not at all. By then tokens of an hour have ended.
_TOKEN_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Explained:
    """An error in words, with what to do. ``is_real``: no later generic error replaces it."""

    text: str
    remedy: str
    is_real: bool


# (pattern of librdkafka's text, words that are added, remedy). The first that matches counts.
_KNOWN: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), words, remedy)
    for pattern, words, remedy in (
        (
            r"unsupported sasl mechanism",
            "the broker does not offer this SASL mechanism",
            "Set sasl.mechanism of the connection to one that the broker offers.",
        ),
        (
            r"oauthbearer token|token endpoint|oauth callback|there is no token for",
            _TOKENLESS,
            "Check the credentials and the token endpoint of the connection.",
        ),
        (
            r"alert (certificate|bad certificate|unknown ca|unsupported certificate|access denied)",
            "the broker refuses the client's certificate",
            "Set ssl.certificate.location and ssl.key.location of the connection to a valid certificate, signed by an "
            "authority that the broker trusts.",
        ),
        (
            r"plaintext broker listener|wrong version number|packet length too long|unknown protocol"
            r"|disconnected.*ssl_handshake",
            "the client uses TLS, and this port probably does not",
            "Take the brokers' port for TLS, or set security.protocol to PLAINTEXT or SASL_PLAINTEXT.",
        ),
        (
            _UNVERIFIED,
            "the broker's certificate does not pass",
            "Check ssl.ca.location of the connection, and the name and the dates of the broker's certificate.",
        ),
        (
            r"authentication fail|sasl authentication error|invalid credentials",
            "the broker refuses the log-in",
            "Correct the user and the password of the connection.",
        ),
    )
)


def plain(error: KafkaError) -> str:
    """The error's name and text, without times and counts."""
    return f"{error.name()}: {_COUNTED.sub('', error.str())}"


def explained(error: KafkaError) -> Explained:
    """A client's error in words, with its own remedy where the cause is known."""
    for pattern, words, remedy in _KNOWN:
        if pattern.search(error.str()):
            return Explained(f"{words} ({plain(error)})", remedy, is_real=True)
    if error.code() in _REFUSED:
        return Explained(plain(error), "Correct the log-in of the connection.", is_real=True)
    return Explained(plain(error), SERVERS_REMEDY, is_real=error.code() not in _GENERIC)


class KeptError:
    """The last real error of one client. A generic one (time is over, all brokers are down) does not replace it; it
    stays until something succeeds. A renewal that fails is reported once, while the old token still works: it is kept
    and shown again when the connection is lost."""

    def __init__(self, config: Mapping[str, Any] | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """``config``: the client's settings, for `examined`. ``now``: seconds of a monotonic clock."""
        self._now = now
        self._token_at = 0.0
        self._config = dict(config or {})
        # librdkafka's callbacks and the readers may be different threads.
        self._lock = threading.Lock()
        self._kept: Explained | None = None
        self._token: Explained | None = None
        self._examined: tuple[Explained, Explained] | None = None
        self._examining: threading.Thread | None = None
        self.is_refused = False
        """Whether the log-in is refused."""

    def note(self, error: KafkaError) -> None:
        """Keep the error, if it says more than the one that is kept."""
        new = explained(error)
        with self._lock:
            if new.is_real:
                self._kept, self.is_refused = new, error.code() in _REFUSED
                if new.text.startswith(_TOKENLESS):
                    self._token, self._token_at = new, self._now()
            elif self._kept is None and self._token is not None and self._now() - self._token_at < _TOKEN_SECONDS:
                text = f"{new.text}; before, {self._token.text}"
                self._kept, self.is_refused = Explained(text, self._token.remedy, is_real=True), True
            elif self._kept is None or not (self._kept.is_real or error.code() == KafkaError._ALL_BROKERS_DOWN):
                self._kept = new

    def connected(self) -> None:
        """A broker is connected. It may have been let in by a token that was not renewed since."""
        with self._lock:
            self._kept, self.is_refused = None, False

    def clear(self) -> None:
        """Something succeeded that needs a log-in of now."""
        with self._lock:
            self._kept = self._token = None
            self.is_refused = False

    @property
    def text(self) -> str | None:
        """The error in words; None if there is none. Returns at once; what a TLS handshake shows is in a later one."""
        kept, examined = self._kept, self._examined
        if kept is None:
            return None
        if examined is not None and examined[0] == kept:
            return examined[1].text
        if not _says_all(kept) and (self._examining is None or not self._examining.is_alive()):
            self._examining = threading.Thread(target=self.examined, name="kafka-error", daemon=True)
            self._examining.start()
        return kept.text

    def examined(self) -> Explained | None:
        """The error, with what a TLS handshake with the server shows. Takes up to 2 s, once for each error."""
        kept = self._kept
        if kept is None or _says_all(kept):
            return kept
        if self._examined is None or self._examined[0] != kept:
            self._examined = kept, _probe(self._config, kept)
        return self._examined[1]


def _says_all(error: Explained) -> bool:
    return error.is_real and _UNVERIFIED not in error.text


def _probe(config: Mapping[str, Any], error: Explained) -> Explained:
    """The error with the cause that one handshake shows; the same error if it shows none."""
    found = _ADDRESS.search(error.text) or _ADDRESS.search(str(config.get("bootstrap.servers", "")))
    if found is None or "refused" in error.text:
        return error
    host, port = found[1].strip("[]"), int(found[2])
    is_tls = str(config.get("security.protocol", "plaintext")).lower().endswith("ssl")
    if is_tls != (_UNVERIFIED in error.text):
        return error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = is_tls and str(config.get("ssl.endpoint.identification.algorithm", "https")) != "none"
    try:
        if not is_tls:
            context.verify_mode = ssl.CERT_NONE
        elif pem := config.get("ssl.ca.pem"):
            context.load_verify_locations(cadata=str(pem))
        elif location := config.get("ssl.ca.location"):
            context.load_verify_locations(cafile=str(location))
        else:
            context.load_default_certs()
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            pass
    except ssl.SSLCertVerificationError as failed:
        return _of_certificate(failed, f"{host}:{port}", config, error)
    except (OSError, ValueError):
        return error
    if is_tls:
        return error
    return Explained(
        f"the port {host}:{port} speaks TLS, and the client does not ({error.text})",
        "Set security.protocol of the connection to SSL or SASL_SSL, or take the brokers' port without TLS.",
        is_real=True,
    )


_DATES = {9: "is not valid yet", 10: "has expired"}
_OTHER_NAME = (62, 64)


def _of_certificate(
    failed: ssl.SSLCertVerificationError, server: str, config: Mapping[str, Any], error: Explained
) -> Explained:
    """``failed`` has OpenSSL's code (x509_vfy.h) and words."""
    if failed.verify_code in _DATES:
        words = f"the certificate of {server} {_DATES[failed.verify_code]}"
        remedy = "Renew the certificate on the broker, or correct the clock of this host."
    elif failed.verify_code in _OTHER_NAME:
        words = f"the certificate of {server} is for another host name: {failed.verify_message.rstrip('.')}"
        remedy = "Take a name that the certificate has as the server, or have a certificate made with this name."
    else:
        authority = config.get("ssl.ca.location") or ("ssl.ca.pem" if config.get("ssl.ca.pem") else "this host's list")
        words = f"no authority of {authority} has signed the certificate of {server}: {failed.verify_message}"
        remedy = "Set ssl.ca.location of the connection to the certificate of the authority that signed the broker's."
    return Explained(f"{words} ({error.text})", remedy, is_real=True)


def missing_file(config: Mapping[str, Any]) -> str | None:
    """A sentence about a file of the settings that cannot be read here; None if all that are used can be."""
    for name, value in config.items():
        if not _is_used(name, config) or str(value) in ("", "probe"):
            continue
        try:
            Path(str(value)).open("rb").close()
        except IsADirectoryError:
            # A directory of certificates, which librdkafka takes as well.
            continue
        except OSError as error:
            why = error.strerror or type(error).__name__
            return f"{name}, {value}, cannot be read on host {socket.gethostname()}: {why}"
    return None


def _is_used(name: str, config: Mapping[str, Any]) -> bool:
    if name.startswith("ssl.") and name.endswith(".location"):
        return str(config.get("security.protocol", "")).lower().endswith("ssl")
    return name == "https.ca.location" and str(config.get("sasl.oauthbearer.method", "")).lower() == "oidc"
