from __future__ import annotations

import pytest

from headrace.spark.connect_token import SECRET_VARIABLE, SecretKeyMissingError, derive, from_environment


def test_a_token_depends_on_secret_stream_and_epoch() -> None:
    tokens = {
        derive("secret", "clicks", 1),
        derive("secret", "clicks", 2),
        derive("secret", "orders", 1),
        derive("another", "clicks", 1),
    }
    assert len(tokens) == 4
    assert all(len(token) == 64 for token in tokens)


def test_both_sides_derive_the_same_token() -> None:
    assert from_environment("clicks", 3, {SECRET_VARIABLE: "secret"}) == derive("secret", "clicks", 3)


@pytest.mark.parametrize("environment", [{}, {SECRET_VARIABLE: ""}])
def test_a_missing_secret_is_an_error_that_names_the_variable(environment: dict[str, str]) -> None:
    with pytest.raises(SecretKeyMissingError, match=SECRET_VARIABLE):
        from_environment("clicks", 1, environment)
