"""Asks a schema registry with Confluent's API, by an Airflow connection. Confluent's own client makes the requests."""

from __future__ import annotations

import difflib
import functools
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from headrace.connections import Connection, resolve
from headrace.errors import HeadraceError
from headrace.formats.missing_library import LibraryMissingError
from headrace.formats.schema_text import SchemaText
from headrace.time_limit import within

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

# The client's own defaults are no time limit, and up to 20 s between two tries.
_SECONDS_A_READ = 5.0
_TRIES_MORE = 1
_WAIT_MS = 200
_TOTAL_SECONDS = 15.0
_MAX_REFERENCES = 100
_SHOWN_CHARACTERS = 60

_UNKNOWN_SCHEMA = 40403
_UNKNOWN_SUBJECT = (40401, 40402)
"""Subject or version. https://docs.confluent.io/platform/current/schema-registry/develop/api.html#errors"""

_SCHEMA = "schema "
_FORMATS = ("AVRO", "PROTOBUF", "JSON")

_PATH_HINT = "Karapace, Redpanda and Confluent serve it at the root, Apicurio below /apis/ccompat/v7"

_EXTRA = {
    "proxy": "proxy",
    "ca_certs": "ssl.ca.location",
    "client_cert": "ssl.certificate.location",
    "client_key": "ssl.key.location",
    "client_key_password": "ssl.key.password",
    "bearer_token": "bearer.auth.token",
    "oauth_token_url": "bearer.auth.issuer.endpoint.url",
    "oauth_client_id": "bearer.auth.client.id",
    "oauth_client_secret": "bearer.auth.client.secret",
    "oauth_scope": "bearer.auth.scope",
    "logical_cluster": "bearer.auth.logical.cluster",
    "identity_pool": "bearer.auth.identity.pool.id",
}
"""The keys of a connection's extra, and the client's names. Its names are taken too, as other tools have them."""
_CREDENTIALS = {"bearer_token": "a token", "oauth_token_url": "a server of tokens"}
_OAUTH = ("oauth_token_url", "oauth_client_id", "oauth_client_secret", "oauth_scope")
_FILES = ("ca_certs", "client_cert", "client_key")
_OWN = ("path", "verify_certs")

_T = TypeVar("_T")


class RegistrySettingError(HeadraceError):
    """A connection of a schema registry has a setting that is unknown, or that does not fit another one."""


class RegistryUnavailableError(HeadraceError):
    """The schema registry gives no answer, or the answer of an overloaded or broken server."""


class RegistryRefusedError(HeadraceError):
    """The schema registry refuses the login, or does not let it read."""


class RegistryPathError(HeadraceError):
    """There is no schema registry with Confluent's API at this address."""


class SchemaUnknownError(HeadraceError):
    """The schema registry does not have a schema of this id."""


class SubjectUnknownError(HeadraceError):
    """The schema registry does not have this subject, or this version of it."""


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of a registry: its format, "AVRO", "PROTOBUF" or "JSON", and its text. ``version`` is the one of its
    subject, if that was asked for."""

    format: str
    schema: SchemaText
    version: int | None = None


class Registry:
    """A schema registry. Nothing is remembered between two questions: what a stream has used, it keeps itself."""

    def __init__(self, connection: Connection, *, seconds: float = _TOTAL_SECONDS) -> None:
        """``seconds``: how long a question may take in all.

        Raises RegistrySettingError, and ConnectionTypeError if it is of another type.
        """
        self.connection_id = connection.id
        self._seconds = seconds
        self._config = client_config(connection)
        self.url = str(self._config["url"])

    @classmethod
    def of(cls, connection_id: str) -> Self:
        """The registry of an Airflow connection. Raises ConnectionNotFoundError, and as the class does."""
        return cls(resolve(connection_id))

    def schema(self, id_: int | str) -> RegisteredSchema:
        """The schema of an id: a number, or the GUID of a header.

        Raises SchemaUnknownError, or as `version` does.
        """

        def ask(client: SchemaRegistryClient) -> RegisteredSchema:
            found = client.get_schema_by_guid(id_) if isinstance(id_, str) else client.get_schema(id_)
            return _registered(client, found)

        return self._asked(f"{_SCHEMA}{id_}", ask)

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema:
        """A version of a subject, by default the newest one.

        Raises:
            SubjectUnknownError: there is no such subject or version.
            RegistryUnavailableError, RegistryRefusedError, RegistryPathError: see there.
        """

        def ask(client: SchemaRegistryClient) -> RegisteredSchema:
            found = client.get_version(subject, "latest" if version is None else version)
            if not isinstance(found.version, int):
                raise SubjectUnknownError(f"What answered for subject {subject!r} names no version.")
            return _registered(client, found.schema, found.version)

        named = f"subject {subject!r}" if version is None else f"version {version} of subject {subject!r}"
        return self._asked(named, ask)

    def _asked(self, what: str, ask: Callable[[SchemaRegistryClient], _T]) -> _T:
        try:
            client = _client(json.dumps(self._config, sort_keys=True))
        except HeadraceError:
            raise
        except Exception as error:
            raise RegistrySettingError(
                f"The connection {self.connection_id!r} cannot be used for a schema registry: "
                f"{type(error).__name__}: {error}.",
                remedy="Correct the connection.",
            ) from error

        def call() -> _T:
            # It keeps every answer for good: a registry that was set up again would not be noticed.
            client.clear_caches()  # type: ignore[no-untyped-call]
            return ask(client)

        try:
            return within(self._seconds, ("registry", self.connection_id, what), call)
        except HeadraceError:
            raise
        except Exception as error:
            self._raise(what, error)

    def _raise(self, what: str, error: Exception) -> NoReturn:
        from confluent_kafka.schema_registry import SchemaRegistryError
        from confluent_kafka.schema_registry.error import OAuthTokenError

        where = f"the schema registry of connection {self.connection_id!r} ({self.url})"
        if isinstance(error, OAuthTokenError):
            self._raise_no_token(error.__context__ or error)
        if not isinstance(error, SchemaRegistryError):
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if isinstance(error, ValueError):
                raise RegistryPathError(
                    f"{where[0].upper()}{where[1:]} answered the question for {what} with something else than JSON.",
                    remedy=f"Correct the connection's host and path: {_PATH_HINT}.",
                ) from error
            raise RegistryUnavailableError(
                f"There is no answer from {where} to the question for {what}: {said}.",
                remedy="The batch is tried again. Look whether the registry runs and can be reached from Spark's hosts "
                "too.",
            ) from error
        status, code, said = error.http_status_code, error.error_code, str(error.error_message)[:300]
        if status in (401, 403):
            raise RegistryRefusedError(
                f"{where[0].upper()}{where[1:]} refuses the question for {what}: {said} (HTTP {status}).",
                remedy="Correct the connection's login or token, and its right to read; the batch is tried again.",
            ) from error
        # For a GUID, a registry that knows none has no code.
        if code == _UNKNOWN_SCHEMA or (status == 404 and what.startswith(_SCHEMA)):
            if what == f"{_SCHEMA}0":
                raise SchemaUnknownError(
                    f"{where[0].upper()}{where[1:]} has no {what}: ids begin at 1. The producer may write ids of eight "
                    "bytes, of which the first four are 0.",
                    remedy="Let the producer write ids of four bytes: docs/guides/registry.md names the settings for "
                    "Apicurio. Records that are written already are dead letters with 0 in refused_ids of the decoder.",
                ) from error
            raise SchemaUnknownError(
                f"{where[0].upper()}{where[1:]} has no {what}.",
                remedy="If records were written with another registry, name its connection. If a record is broken, add "
                "the id to refused_ids of the decoder: its records are then dead letters. If the registry has no "
                f"schema at all, look at the connection's path: {_PATH_HINT}.",
            ) from error
        if code in _UNKNOWN_SUBJECT:
            raise SubjectUnknownError(
                f"{where[0].upper()}{where[1:]} has no {what}.",
                remedy="A subject is named <topic>-value or <topic>-key by default; name another one in the decoder's "
                "subject. The batch is tried again.",
            ) from error
        if status == 404:
            raise RegistryPathError(
                f"There is no schema registry with Confluent's API at {self.url} (connection {self.connection_id!r}), "
                f"or it does not know the question for {what}: {said} (HTTP 404).",
                remedy=f"Correct the connection's host and path: {_PATH_HINT}.",
            ) from error
        raise RegistryUnavailableError(
            f"{where[0].upper()}{where[1:]} answered the question for {what} with HTTP {status}: {said}.",
            remedy="The batch is tried again. The registry's own log has the cause.",
        ) from error

    def _raise_no_token(self, error: BaseException) -> NoReturn:
        """The client names neither the login server nor whether it refused: what it met first says so."""
        from authlib.common.errors import AuthlibBaseError

        where = f"The login server {self._config['bearer.auth.issuer.endpoint.url']}"
        named = f"the schema registry's connection {self.connection_id!r}"
        if isinstance(error, AuthlibBaseError):
            raise RegistryRefusedError(
                f"{where} of {named} gives no token: {str(error)[:300]}.",
                remedy="Correct oauth_client_id, oauth_client_secret and oauth_scope; the batch is tried again.",
            ) from error
        raise RegistryUnavailableError(
            f"{where} of {named} gives no answer with a token: {type(error).__name__}: {str(error)[:300]}.",
            remedy="The batch is tried again. Look whether the server can be reached from Spark's hosts too. Its "
            "certificate must be of an authority that the system, or SSL_CERT_FILE, names.",
        ) from error


@functools.lru_cache(maxsize=16)
def _client(config: str) -> SchemaRegistryClient:
    """Confluent's client with these settings, as JSON. Its import takes some 0.2 s, and each one some 20 ms.

    Raises LibraryMissingError.
    """
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise LibraryMissingError.of("ask a schema registry", error) from error
    return SchemaRegistryClient(json.loads(config))


def _registered(client: SchemaRegistryClient, found: Schema, version: int | None = None) -> RegisteredSchema:
    references: dict[str, str] = {}
    _add_references(client, found, references, open_=set())
    format_ = found.schema_type or _FORMATS[0]
    if format_ not in _FORMATS:
        raise RegistryPathError(
            f"The schema registry answered with a schema of the format {format_[:_SHOWN_CHARACTERS]!r}, which is none "
            f"of {', '.join(_FORMATS)}.",
            remedy=f"Correct the connection's host and path: {_PATH_HINT}.",
        )
    return RegisteredSchema(format_, SchemaText(_text_of(found), tuple(references.items())), version)


def _text_of(found: Schema) -> str:
    """The schema's text. An answer without one is not the registry's, and is not to be kept."""
    if not isinstance(found.schema_str, str) or not found.schema_str.strip():
        raise RegistryPathError(
            "What answered as the schema registry has no schema in its answer.",
            remedy=f"Look whether a gateway answers in its place, and correct the connection: {_PATH_HINT}.",
        )
    return found.schema_str


def _add_references(client: SchemaRegistryClient, of: Schema, known: dict[str, str], open_: set[str]) -> None:
    """Add what a schema refers to, each after what it refers to itself."""
    for reference in of.references or ():
        name, subject, version = reference.name, reference.subject, reference.version
        if name is None or subject is None or version is None or name in known or name in open_:
            continue
        if len(known) + len(open_) >= _MAX_REFERENCES:
            raise RegistryPathError(
                f"A schema refers to more than {_MAX_REFERENCES} others.",
                remedy="Give the decoder the schema of the columns as schema_text, and put its records' ids into "
                "refused_ids.",
            )
        open_.add(name)
        # A subject that was deleted after it was referred to is still there for those that refer to it.
        found = client.get_version(subject, version, deleted=True)
        _add_references(client, found.schema, known, open_)
        open_.discard(name)
        known[name] = _text_of(found.schema)


def client_config(connection: Connection) -> dict[str, Any]:
    """The settings of Confluent's client for an Airflow connection of type ``http``, ``https`` or ``schema_registry``.

    Raises RegistrySettingError, and ConnectionTypeError if it is of another type.
    """
    connection.check_type("http", "https", "schema_registry")
    extra = _named(connection)
    config: dict[str, Any] = {
        "url": _urls(connection, extra),
        "timeout": _SECONDS_A_READ,
        "max.retries": _TRIES_MORE,
        "retries.wait.ms": _WAIT_MS,
        "retries.max.wait.ms": _WAIT_MS,
    }
    given = [words for name, words in _CREDENTIALS.items() if extra.get(name)]
    given += ["a login"] if connection.login else []
    if len(given) > 1:
        raise RegistrySettingError(f"Connection {connection.id!r} has {' and '.join(given)}.", remedy="Keep one.")
    if connection.login:
        config["basic.auth.user.info"] = f"{connection.login}:{connection.password or ''}"
    config |= {
        _EXTRA[name]: extra[name] for name in _EXTRA if extra.get(name) and not _EXTRA[name].startswith("bearer")
    }
    for name in _FILES:
        if extra.get(name) and not Path(str(extra[name])).exists():
            raise RegistrySettingError(
                f"The file {extra[name]}, which {name} of connection {connection.id!r} names, is not on the host "
                f"{socket.gethostname()}.",
                remedy="Put it there, on Spark's hosts too.",
            )
    if str(extra.get("verify_certs", True)).lower() == "false":
        config["ssl.ca.location"] = False
    bearer = {_EXTRA[name]: extra[name] for name in _EXTRA if extra.get(name) and _EXTRA[name].startswith("bearer")}
    if not given or connection.login:
        return config
    # The client asks for the cluster, which Confluent's cloud needs and nobody else.
    bearer.setdefault("bearer.auth.logical.cluster", "")
    if extra.get("oauth_token_url"):
        missing = [name for name in _OAUTH[:3] if not extra.get(name)]
        if missing:
            raise RegistrySettingError(
                f"The extra of connection {connection.id!r} has no {', '.join(missing)}.",
                remedy="oauth_token_url, oauth_client_id and oauth_client_secret go together; oauth_scope may follow.",
            )
        bearer.setdefault("bearer.auth.scope", "")
    source = "OAUTHBEARER" if extra.get("oauth_token_url") else "STATIC_TOKEN"
    return {**config, **bearer, "bearer.auth.credentials.source": source}


def _named(connection: Connection) -> Mapping[str, Any]:
    """The extra under headrace's names."""
    ours = {client: name for name, client in _EXTRA.items()}
    extra = {ours.get(name, name): value for name, value in connection.extra.items() if value is not None}
    if unknown := sorted(set(extra) - set(_EXTRA) - set(_OWN)):
        allowed = sorted({*_EXTRA, *_OWN})
        near = [found[0] for name in unknown if (found := difflib.get_close_matches(name, allowed, n=1))]
        raise RegistrySettingError(
            f"The extra of connection {connection.id!r} has {', '.join(map(repr, unknown))}.",
            remedy=(f"Did you mean {', '.join(near)}? " if near else "") + f"It may have {', '.join(allowed)}.",
        )
    return extra


def _urls(connection: Connection, extra: Mapping[str, Any]) -> str:
    """The addresses, separated by commas: the client asks them in turn."""
    if not connection.host:
        raise RegistrySettingError(
            f"Connection {connection.id!r} has no host.", remedy="Give the host of the schema registry, or its URL."
        )
    # The schema is the protocol in Airflow's form, and the path in a URI.
    schema = (connection.schema or "").strip("/")
    protocol = schema.lower() if schema.lower() in ("http", "https") else ""
    path = str(extra.get("path") or ("" if protocol else schema)).strip("/")
    protocol = protocol or ("https" if connection.conn_type == "https" else "http")
    urls = []
    for host in connection.host.split(","):
        parts = urlsplit(host.strip() if "://" in host else f"{protocol}://{host.strip()}")
        try:
            port = connection.port if parts.port is None else parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or port == 0:
            # The text may hold a credential, so it is not repeated.
            raise RegistrySettingError(
                f"A host of connection {connection.id!r} is no http or https URL, or holds a login.",
                remedy="Write it as https://registry:8081, and the login into its own fields.",
            )
        named = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        below = parts.path.strip("/") or path
        urls.append(f"{parts.scheme}://{named}{f':{port}' if port else ''}{f'/{below}' if below else ''}")
    return ",".join(urls)
