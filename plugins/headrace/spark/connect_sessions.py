"""Spark Connect sessions in a receiver job's application: how they begin, end, and are named.

The token leaves this machine only over TLS. pyspark allows a token without TLS only for the host ``localhost``, where
gRPC's local credentials check that the peer is on this machine. So 127.0.0.1 is replaced by ``localhost``.
"""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

from headrace.spark.sessions import first_line

CONNECT_PLUGIN = "org.apache.spark.sql.connect.SparkConnectPlugin"


USER_ID = "headrace"


_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


_DEFAULT_PORT = 15002


_SESSIONS = uuid.UUID("6f1c3d0a-7e0f-5d0b-9a55-0f6f9d6f2c11")


# 0.2 s doubled eight times gives 50 s of retries with a server that is busy. pyspark's default is ten minutes, but the
# lease shows much earlier that a receiver job has died.
_RETRIES: dict[str, Any] = {"max_retries": 8, "initial_backoff": 200, "backoff_multiplier": 2.0, "max_backoff": 30_000}


class ConnectUrlError(HeadraceError):
    """The URL is not a Spark Connect URL, contains a token, or would send the token unencrypted."""


class ConnectRefusedError(HeadraceError):
    """The Spark Connect server did not accept the session: it is not reachable, or has another token."""


def connect_session(url: str, token: str, *, session_id: str | None = None) -> SparkSession:
    """Open a session with the Spark Connect server at ``url`` (``sc://host:port``) and check it with one call.

    From then on this process uses Spark Connect: ``pyspark.sql.functions`` builds Connect expressions.
    Raises ConnectUrlError, and ConnectRefusedError if the server is not reachable or refuses the token.
    """
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    return remote_session(url, token, session_id=session_id)


def remote_session(url: str, token: str, *, session_id: str | None = None) -> SparkSession:
    """Like `connect_session`, for a process that keeps its classic session. Use only the session's own methods."""
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    class UntilGone(DefaultPolicy):
        """Retries no call to a server whose process has ended: each call of a range would be retried for 50 s."""

        def can_retry(self, error: BaseException) -> bool:
            return super().can_retry(error) and not is_gone(url)

    session = RemoteSession.builder.channelBuilder(_channel(url, token, session_id)).create()
    session.client.set_retry_policies([UntilGone(**_RETRIES)])
    try:
        _ = session.version
    except PySparkException as error:
        session.client.close()
        raise ConnectRefusedError(
            f"The Spark Connect server at {url} refused the session: {first_line(str(error)) or type(error).__name__}.",
            remedy="Check that the receiver job is alive and that both sides have the same HEADRACE_SECRET_KEY.",
        ) from error
    return cast("SparkSession", session)


def is_gone(url: str) -> bool:
    """Whether the Connect server at this URL was on this machine and has ended: nothing listens at its port.

    No other server comes to that port, since Spark chooses one when it starts. A busy server's port takes connections.
    """
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK_HOSTS:
        return False
    address = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    try:
        socket.create_connection((address, parts.port or _DEFAULT_PORT), timeout=1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def protected_url(url: str) -> str:
    """``url`` in pyspark's form; raises ConnectUrlError unless it is loopback or has ``use_ssl=true``."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme != "sc" or not host or parts.path.split(";")[0] not in ("", "/"):
        raise ConnectUrlError(f"{url!r} is not a Spark Connect URL.", remedy="Write sc://host:port.")
    parameters = parts.path.split(";")[1:]
    if any(parameter.startswith("token=") for parameter in parameters):
        raise ConnectUrlError(
            "A Spark Connect URL must not contain a token.", remedy="Remove it: headrace derives the token."
        )
    if host in _LOOPBACK_HOSTS:
        return f"sc://localhost:{parts.port or _DEFAULT_PORT}/" + "".join(f";{parameter}" for parameter in parameters)
    if "use_ssl=true" not in parameters:
        raise ConnectUrlError(
            f"The Spark Connect server at {host} is not on this machine, and its URL does not ask for TLS.",
            remedy="Put a TLS endpoint before it and add ;use_ssl=true to its URL, or run batches with way 'submit'.",
        )
    return url


def attempt_session_id(attempt: AttemptName) -> str:
    """The session id of an attempt, derived from its name, so that a later attempt can end an earlier one's session."""
    return str(uuid.uuid5(_SESSIONS, "\n".join(_parts(attempt))))


def end_session(url: str, token: str, session_id: str, tag: str, *, release: bool = True) -> list[str]:
    """Interrupt the operations with ``tag`` of another session and release it. Returns the operations' ids.

    ``release``: False if others may use the session, whose operations a release would interrupt.

    Returns an empty list if the server does not know the session (any more) or does not answer.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import SparkConnectClient

    channel = _channel(url, token, session_id)
    client = SparkConnectClient(connection=channel, retry_policy={**_RETRIES, "max_retries": 2})
    try:
        interrupted = client.interrupt_tag(tag)
        if release:
            client.release_session()
        return list(interrupted or ())
    except PySparkException:
        return []
    finally:
        client.close()


def _channel(url: str, token: str, session_id: str | None) -> DefaultChannelBuilder:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    builder = DefaultChannelBuilder(protected_url(url))
    # Set here rather than in the URL: pyspark repeats URLs in its errors.
    builder.set("token", token)
    builder.set("user_id", USER_ID)
    if session_id is not None:
        builder.set("session_id", session_id)
    return builder


def fail_fast(spark: SparkSession) -> None:
    """Make further calls of a Connect session fail soon if the server does not answer: the session is being closed."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    cast("Any", spark).client.set_retry_policies([DefaultPolicy(**{**_RETRIES, "max_retries": 1})])


class AttemptName(Protocol):
    """The part of an attempt's row or claim that names its sessions and jobs."""

    @property
    def stream(self) -> str: ...
    @property
    def batch_time_ms(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def target(self) -> str: ...


def attempt_tag(attempt: AttemptName) -> str:
    """The tag (and job group) of one attempt's Spark jobs."""
    # Spark joins tags with commas, so a tag must not contain one. Stream names have none; this is only a safeguard.
    return "/".join(["headrace", *_parts(attempt)]).replace(",", "_")


def _parts(attempt: AttemptName) -> list[str]:
    """The parts that identify an attempt: stream, batch time, a replay's target, and number."""
    replay = [attempt.target] if attempt.target else []
    return [attempt.stream, str(attempt.batch_time_ms), *replay, str(attempt.number)]
