"""Spark sessions: settings, tokens, and what is refused, without Spark."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.ledger import AttemptState
from headrace.ledger.batches.tables import AttemptRow
from headrace.spark import versions
from headrace.spark.attempts.batch_command import replaces
from headrace.spark.connect_sessions import (
    ConnectRefusedError,
    ConnectUrlError,
    attempt_session_id,
    attempt_tag,
    is_gone,
    protected_url,
    remote_session,
)
from headrace.spark.job_token import (
    APPLICATION,
    SECRET_VARIABLE,
    SecretKeyMissingError,
    derive_token,
    secret_fingerprint,
    token_from_environment,
    token_of_job,
)
from headrace.spark.versions import VersionMismatchError, check_versions, current_versions


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_needs_no_tls_and_is_spelled_for_pyspark(host: str) -> None:
    assert protected_url(f"sc://{host}:15002") == "sc://localhost:15002/"


def test_beyond_loopback_tls_is_required() -> None:
    with pytest.raises(ConnectUrlError, match="does not ask for TLS"):
        protected_url("sc://spark.example:15002")
    assert protected_url("sc://spark.example:443/;use_ssl=true") == "sc://spark.example:443/;use_ssl=true"


@pytest.mark.parametrize("url", ["http://localhost", "sc://", "sc://localhost/path", "localhost:15002"])
def test_what_is_no_connect_url_is_refused(url: str) -> None:
    with pytest.raises(ConnectUrlError, match="not a Spark Connect URL"):
        protected_url(url)


def test_a_token_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConnectUrlError) as refused:
        protected_url("sc://localhost:1/;token=abc123")
    assert "abc123" not in str(refused.value)


def test_a_server_of_this_machine_is_gone_if_its_port_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # It is busy, and accepts nothing.
        assert not is_gone(f"sc://localhost:{port}")
    assert is_gone(f"sc://localhost:{port}")
    assert not is_gone("sc://spark.example:443/;use_ssl=true"), "a proxy may be restarting"


def test_a_call_to_a_server_that_is_gone_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pauses: list[float] = []
    # pyspark pauses by it between two tries.
    monkeypatch.setattr("pyspark.sql.connect.client.retries.Retrying.__init__.__defaults__", (pauses.append,))
    with pytest.raises(ConnectRefusedError):
        remote_session(f"sc://localhost:{port}", "token")
    assert not pauses


@dataclass(frozen=True)
class Named:
    """As much of an attempt as its sessions and jobs are named by."""

    stream: str = "clicks"
    batch_time_ms: int = 1000
    number: int = 1
    target: str = ""


def test_an_attempts_session_and_tag_are_its_own_every_time() -> None:
    attempts = [Named(s, t, a, r) for s in ("a", "b") for t in (1, 2) for a in (1, 2) for r in ("", "v2")]
    assert len({attempt_session_id(attempt) for attempt in attempts}) == 16
    assert len({attempt_tag(attempt) for attempt in attempts}) == 16
    assert attempt_session_id(Named()) == attempt_session_id(Named())
    uuid.UUID(attempt_session_id(Named()))


def test_a_tag_has_no_comma() -> None:
    assert "," not in attempt_tag(Named(stream="a,b"))


def attempt_row(number: int, *outputs: str, target: str = "") -> AttemptRow:
    ended: Any = {"started_at_ms": 0, "lease_ms": 1, "lease_until_ms": 1, "heartbeat_ms": 0, "ended_at_ms": None}
    return AttemptRow(
        "clicks", 1000, number, "test", "connect", AttemptState.RUNNING, outputs, {}, error=None, target=target, **ended
    )


def test_an_attempt_replaces_earlier_ones_at_its_outputs_only() -> None:
    attempt = attempt_row(3, "a", "b").claim()
    assert replaces(attempt, attempt_row(1, "b", "c"))
    assert not replaces(attempt, attempt_row(1, "c")), "runs beside it"
    assert not replaces(attempt, attempt_row(4, "a")), "a later one"
    assert not replaces(attempt, attempt_row(1, "a", target="v2")), "a replay's"
    assert replaces(attempt_row(3, "a", target="v2").claim(), attempt_row(2, "a", target="v2"))


def test_a_token_depends_on_secret_stream_and_epoch() -> None:
    tokens = {
        derive_token("secret", "clicks", 1),
        derive_token("secret", "clicks", 2),
        derive_token("secret", "orders", 1),
        derive_token("another", "clicks", 1),
    }
    assert len(tokens) == 4
    assert all(len(token) == 64 for token in tokens)


def test_both_sides_derive_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    assert token_from_environment("clicks", 3) == derive_token("secret", "clicks", 3)


@pytest.mark.parametrize("secret", [None, ""])
def test_a_missing_secret_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(SecretKeyMissingError, match=SECRET_VARIABLE):
        token_from_environment("clicks", 1)


def test_the_fingerprint_tells_secrets_apart_and_is_not_a_token() -> None:
    own = secret_fingerprint("secret", "clicks")
    assert own == secret_fingerprint("secret", "clicks")
    assert own not in {secret_fingerprint("other", "clicks"), secret_fingerprint("secret", "orders")}
    assert not derive_token("secret", "clicks", 1).startswith(own)


def test_the_token_of_a_job_is_that_of_its_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is the one in which the job runs."""
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    own: Any = SimpleNamespace(stream="clicks", epoch=3, attributes={})
    shared: Any = SimpleNamespace(stream="clicks", epoch=3, attributes={APPLICATION: ["@shared", 7]})
    assert token_of_job(own) == derive_token("secret", "clicks", 3)
    assert token_of_job(shared) == derive_token("secret", "@shared", 7)


def test_equal_versions_pass() -> None:
    check_versions(current_versions())


def test_more_in_the_lease_than_we_know_passes() -> None:
    check_versions({**current_versions(), "java": "17"})


def test_every_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"python": "3.11", "pyspark": "4.2.0", "headrace": "0.1"}
    monkeypatch.setattr(versions, "current_versions", lambda: ours)
    with pytest.raises(VersionMismatchError, match=r"python 3.9 there, 3.11 here; headrace unknown there, 0.1 here"):
        check_versions({"python": "3.9", "pyspark": "4.2.0"})
