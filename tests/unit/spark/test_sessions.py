from __future__ import annotations

import uuid

import pytest

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
    with pytest.raises(ConnectUrlError, match="no Spark Connect URL"):
        protected_url(url)


def test_a_token_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConnectUrlError) as refused:
        protected_url("sc://localhost:1/;token=abc123")
    assert "abc123" not in str(refused.value)


def test_an_attempts_session_is_always_the_same_and_its_own() -> None:
    assert attempt_session_id("clicks", 1000, 1) == attempt_session_id("clicks", 1000, 1)
    assert len({attempt_session_id(s, t, a) for s in ("a", "b") for t in (1, 2) for a in (1, 2)}) == 8
    uuid.UUID(attempt_session_id("clicks", 1000, 1))


def test_a_tag_has_no_comma() -> None:
    assert "," not in attempt_tag("a,b", 1000, 2)
