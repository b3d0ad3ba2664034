"""The tokens of SASL OAUTHBEARER: who makes them for a connection, and the callback that gives them to one client.

A connection's tokens come from where Airflow's Kafka provider takes them: a function that the connection names, the
signer of Amazon MSK, or Google's credentials. (With ``sasl.oauthbearer.method=oidc`` librdkafka asks for them itself.)
Settings name the function and do not hold it, so they can be pickled: it is imported where the client is.

confluent-kafka calls the function in a thread of its own, when a client is made and when 80% of a token's life are
over. What the function raises is lost there, and a client whose first token is missing waits 10 s and does not say why.
So `with_tokens` fetches the first token itself, and puts the reason of later failures into the client's errors.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import re
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Any, Literal, Self

from confluent_kafka import KafkaError

from headrace.connections import ALLOWLIST_VARIABLE, Connection, ConnectionNotFoundError, resolve, variable_of
from headrace.kafka.errors import ClientSettingError, TokenError
from headrace.secrets import without_secrets
from headrace.time_limit import within

logger = logging.getLogger(__name__)

Token = tuple[Any, ...]
"""The token and the seconds since the epoch at which it ends; then, optionally, its principal and its extensions."""

OAUTH_CALLBACK = "oauth_cb"

# The names of MSK's bootstrap servers, as in Airflow's provider:
# b-1.demo.abcde1.c2.kafka.us-east-1.amazonaws.com:9098, boot-abcde1.c2.kafka-serverless.us-east-1.amazonaws.com:9098.
_MSK = re.compile(
    r"\.kafka(?:-serverless)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?(?::\d+)?(?=$|[,\s])", re.IGNORECASE
)
GOOGLE_CONNECTION = "google_cloud_default"
"""The connection whose key Airflow's provider takes for Google's Kafka."""

_GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_GOOGLE_HEADER = {"typ": "JWT", "alg": "GOOG_OAUTH2_TOKEN"}
_PACKAGES = {"aws_msk_iam_sasl_signer": "aws-msk-iam-sasl-signer-python", "google": "google-auth"}
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_MAX_LETTERS = 500
TOKEN_SECONDS = 30.0
"""How long the making of a token may take. A function asks a server, which may not answer; Google's client alone waits
for two minutes, and tries again."""


@dataclass(frozen=True)
class TokenSource:
    """Makes a connection's tokens. ``argument`` is the function's path, MSK's region, or the key for Google (JSON)."""

    connection: str
    kind: Literal["function", "msk", "google"]
    argument: str = field(default="", repr=False)

    @classmethod
    def of(cls, connection: Connection, config: Mapping[str, Any], environ: Mapping[str, str] | None) -> Self:
        """The source of the tokens for these client settings, whose mechanism is OAUTHBEARER.

        Raises:
            ClientSettingError: the connection names a function that is not allowed, or nothing makes its tokens.
        """
        servers = str(config.get("bootstrap.servers", ""))
        if config.get(OAUTH_CALLBACK) is not None:
            return cls(connection.id, "function", _allowed(connection.id, config[OAUTH_CALLBACK], environ))
        if is_google(servers):
            return cls(connection.id, "google", _google_key(environ))
        if (msk := _MSK.search(servers)) is not None:
            return cls(connection.id, "msk", msk["region"].lower())
        raise ClientSettingError(
            f"The {connection.id!r} connection logs in by OAUTHBEARER, and nothing makes its tokens: it names no "
            "oauth_cb, sasl.oauthbearer.method is not oidc, and its servers are neither Amazon MSK's nor Google's.",
            remedy="Set sasl.oauthbearer.method to oidc, with the settings of its token endpoint, or oauth_cb to a "
            "function that makes tokens (docs/guides/kafka-log-ins.md).",
        )

    def token(self, config: str | None) -> Token:
        """A new token. ``config`` is the connection's ``sasl.oauthbearer.config``.

        Raises:
            TokenError: there is none; the error names the reason, the connection and this host.
        """
        try:
            made = within(TOKEN_SECONDS, self, lambda: _MAKERS[self.kind](self.argument, config))
        except ImportError as error:
            raise self._error(*_missing(error)) from error
        except Exception as error:  # the function may raise anything
            reason = " ".join(without_secrets(f"{type(error).__name__}: {error}").split())[:_MAX_LETTERS]
            # Not from it: its arguments, and the lines of its traceback, may hold secrets in any form.
            raise self._error(reason + _place(error), "Check the credentials that it finds on this host.") from None
        wrong = _wrong_with(made)
        if wrong is not None:
            raise self._error(wrong, "Let it return the token (a str) and the seconds since the epoch when it ends.")
        token: Token = made
        return token

    def _error(self, reason: str, remedy: str) -> TokenError:
        maker = {"function": self.argument, "msk": "the signer of Amazon MSK", "google": "Google's credentials"}
        return TokenError(
            f"On host {socket.gethostname()} there is no token for the Kafka connection {self.connection!r} "
            f"({maker[self.kind]}): {reason}.",
            remedy=remedy,
        )


def _place(error: Exception) -> str:
    """Where the error was raised, in place of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def is_google(servers: str) -> bool:
    """Whether bootstrap servers are those of Google's Managed Service for Kafka, as Airflow's provider decides it."""
    return "cloud.goog" in servers and "managedkafka" in servers


def _allowed(connection_id: str, reference: object, environ: Mapping[str, str] | None) -> str:
    """The path of a function that the configuration allows, with dots. Raises ClientSettingError for any other."""
    path = str(reference).replace(":", ".")
    text = variable_of(ALLOWLIST_VARIABLE, environ) or ""
    allowed = {entry.strip().replace(":", ".") for entry in text.split(",")} - {""}
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(path) or path not in allowed:
        raise ClientSettingError(
            f"The {connection_id!r} connection names the function {str(reference)[:_MAX_LETTERS]!r} as oauth_cb, "
            f"which is not among the allowed ones ({', '.join(sorted(allowed)) or 'none'}).",
            remedy="If the function is to run with the rights of your tasks, add it to [apache_kafka] "
            f"callback_allowlist; without Airflow, to the variable {ALLOWLIST_VARIABLE}.",
        )
    return path


def _missing(error: ImportError) -> tuple[str, str]:
    """The reason and the remedy when a module is not there."""
    package = _PACKAGES.get(str(error.name or "").split(".", maxsplit=1)[0])
    what = str(error) if package is None else f"the package {package} is not installed"
    return what, f"Install {package or 'it'} in headrace's Python environment on this host, as on each executor's."


def _wrong_with(made: Any) -> str | None:
    """Why this is no token; None if it is one. confluent-kafka would end the process, or would not say it."""
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        return f"the function returned a {type(made).__name__}, not a tuple of a token and its end"
    token, ends_at, *more = made
    if not isinstance(token, str) or not token or isinstance(ends_at, bool) or not isinstance(ends_at, int | float):
        return "the function returned no text and number"
    if more and (not isinstance(more[0], str) or not all(isinstance(extensions, dict) for extensions in more[1:])):
        return "the function returned a principal that is no text, or extensions that are no dict"
    if ends_at <= time.time():
        return f"the token ended {time.time() - ends_at:.0f} s ago"
    return None


def _function_token(path: str, config: str | None) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(config)


def _msk_token(region: str, _: str | None) -> object:
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider

    token, ends_at_ms = MSKAuthTokenProvider.generate_auth_token(region)
    return token, ends_at_ms / 1000


def _google_token(key: str, _: str | None) -> object:
    """A token in the form that Google's brokers take: header, claims and the access token, each in base64."""
    import google.auth
    from google.auth.transport import requests

    if key:
        from google.oauth2 import service_account

        account: Any = service_account.Credentials
        credentials = account.from_service_account_info(json.loads(key), scopes=[_GOOGLE_SCOPE])
    else:
        credentials, _project = google.auth.default(scopes=[_GOOGLE_SCOPE])
    if not credentials.valid:
        credentials.refresh(requests.Request())
    # google-auth's times are in UTC and have no zone.
    ends_at = credentials.expiry.replace(tzinfo=UTC).timestamp()
    claims = {
        "exp": ends_at,
        "iss": "Google",
        "iat": time.time(),
        "scope": "kafka",
        "sub": credentials.service_account_email,
    }
    parts = (json.dumps(_GOOGLE_HEADER), json.dumps(claims), str(credentials.token))
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts), ends_at


def _google_key(environ: Mapping[str, str] | None) -> str:
    """The service account's key in Airflow's connection for Google. "": its credentials are the host's own."""
    try:
        extra = resolve(GOOGLE_CONNECTION, environ).extra
    except ConnectionNotFoundError:
        return ""
    given = {name: extra.get(name) or extra.get(f"extra__google_cloud_platform__{name}") for name in _GOOGLE_KEYS}
    if given["keyfile_dict"]:
        key = given["keyfile_dict"]
        return key if isinstance(key, str) else json.dumps(key)
    try:
        return Path(str(given["key_path"])).read_text(encoding="utf-8") if given["key_path"] else ""
    except OSError as error:
        raise ClientSettingError(
            f"The key of connection {GOOGLE_CONNECTION!r}, {given['key_path']}, cannot be read on this host: {error}.",
            remedy="Put the file there, or the key into the connection (keyfile_dict).",
        ) from error


_GOOGLE_KEYS = ("keyfile_dict", "key_path")

_MAKERS: Mapping[str, Callable[[str, str | None], Any]] = {
    "function": _function_token,
    "msk": _msk_token,
    "google": _google_token,
}


class ClientTokens:
    """The callback of one client. confluent-kafka calls it in a thread of its own."""

    def __init__(self, source: TokenSource, config: str | None) -> None:
        """Fetches the first token. Raises TokenError."""
        self._source = source
        self._first: Token | None = source.token(config)
        self.error: str | None = None
        """Why there was no token at the last call; None if there was one."""

    def __call__(self, config: str | None) -> Token:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            token = self._source.token(config)
        except TokenError as error:
            if self.error != error.what:
                logger.error("%s It is tried again.", error)
            self.error = error.what
            raise
        self.error = None
        return token

    def explained(self, error: KafkaError) -> KafkaError:
        """The client's error, with the reason if it is that the callback raised an error."""
        if error.code() == KafkaError._AUTHENTICATION and self.error is not None and _RAISED in error.str():
            return KafkaError(error.code(), self.error)
        return error


# What confluent-kafka says of a callback that raises.
_RAISED = "OAuth callback raised exception"


def with_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a client of its own: a `TokenSource` is replaced by a callback that has the first token.

    Raises:
        TokenError: there is no token.
    """
    source = config.get(OAUTH_CALLBACK)
    if not isinstance(source, TokenSource):
        return dict(config)
    tokens = ClientTokens(source, config.get("sasl.oauthbearer.config"))
    made = {**config, OAUTH_CALLBACK: tokens}
    on_error = config.get("error_cb")
    if on_error is not None:
        made["error_cb"] = lambda error: on_error(tokens.explained(error))
    return made
