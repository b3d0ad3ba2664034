from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.ledger import AttemptState
from headrace.ledger.batch_tables import AttemptRow
from headrace.spark.batch_command import replaces
from headrace.spark.sessions import ConnectUrlError, attempt_session_id, attempt_tag, protected_url


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_needs_no_tls_and_is_spelled_as_pyspark_wants_it(host: str) -> None:
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


@dataclass(frozen=True)
class Named:
    """As much of an attempt as its sessions and jobs are named by."""

    stream: str = "clicks"
    batch_time_ms: int = 1000
    number: int = 1
    target: str = ""


def test_an_attempts_session_and_tag_are_always_the_same_and_its_own() -> None:
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


def test_an_attempt_takes_the_place_of_earlier_ones_at_its_outputs_and_of_no_others() -> None:
    attempt = attempt_row(3, "a", "b").claim()
    assert replaces(attempt, attempt_row(1, "b", "c"))
    assert not replaces(attempt, attempt_row(1, "c")), "runs beside it"
    assert not replaces(attempt, attempt_row(4, "a")), "a later one"
    assert not replaces(attempt, attempt_row(1, "a", target="v2")), "a replay's"
    assert replaces(attempt_row(3, "a", target="v2").claim(), attempt_row(2, "a", target="v2"))
