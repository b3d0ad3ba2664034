from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.sessions import (
    APPLICATION,
    SECRET_VARIABLE,
    SecretKeyMissingError,
    derive_token,
    secret_fingerprint,
    token_from_environment,
    token_of_job,
)


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


def test_the_fingerprint_distinguishes_secrets_and_is_not_a_token() -> None:
    own = secret_fingerprint("secret", "clicks")
    assert own == secret_fingerprint("secret", "clicks")
    assert own not in {secret_fingerprint("other", "clicks"), secret_fingerprint("secret", "orders")}
    assert not derive_token("secret", "clicks", 1).startswith(own)


def test_the_token_of_a_job_is_that_of_the_application_in_which_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    own: Any = SimpleNamespace(stream="clicks", epoch=3, attributes={})
    shared: Any = SimpleNamespace(stream="clicks", epoch=3, attributes={APPLICATION: ["@shared", 7]})
    assert token_of_job(own) == derive_token("secret", "clicks", 3)
    assert token_of_job(shared) == derive_token("secret", "@shared", 7)
