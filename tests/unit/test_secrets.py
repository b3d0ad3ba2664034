"""The list of what a secret looks like, and the filter that takes secrets out of foreign text."""

from __future__ import annotations

import json
import logging
import traceback

import pytest

from headrace.connections import from_text
from headrace.errors import HeadraceError
from headrace.secrets import CleanFormatter, without_secrets

S = "S3CR3T9x"

FOREIGN = [
    f"401 from https://idp/token?client_id=a&client_secret={S} response={{'access_token':'{S}'}}",
    f"postgresql://u:{S}@h/db refused",
    f"Authorization: Bearer {S}.{S}",
    f"Authorization: Basic {S}==",
    f"'Authorization': 'ApiKey {S}=='",
    f'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="{S}";',
    f'{{"error":"x","access_token":"{S}"}}',
    f'{{\\"access_token\\":\\"{S}\\"}}',
    f"-----BEGIN RSA PRIVATE KEY-----\n{S}\nMII\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\\n{S}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.{S}",
    f"Map(password -> {S}, user -> me)",
    f"(password,{S})",
    f"--password {S}",
    f"<Password>{S}</Password>",
    f"[('authorization', 'Bearer {S}')]",
    f"API key: {S}",
    f"password {S!r} is wrong",
    f"sasl.oauthbearer.config=client_secret={S}",
    f"PGPASSWORD={S}",
    f"client_secret%3D{S}",
    f"https://hooks.slack.com/services/T/B/{S}",
    f"invalid_client: secret={S}",
    f"{{'client_secret': ['{S}']}}",
    f"x-api-key: {S}",
    f"amqp://u:p/{S}@h/v",
    f"https://{S}@h/x",
    f"AccountKey={S};EndpointSuffix=core",
    f"password: {S}",
    f"b'password={S}'",
    f"token={S}",
    f"Cookie: session={S}; a={S}",
    f"spark.hadoop.fs.s3a.secret.key={S}",
    f"option password: {S}",
    f"X-Amz-Signature={S}",
    f"https://s/x?X-Amz-Credential={S}%2F2026&X-Amz-Signature={S}",
    f"DD_APP_KEY={S}",
    f"headers={{'Authorization': b'Bearer {S}'}}",
    f"Authorization: AWS4-HMAC-SHA256 Credential={S}/2026/s3, SignedHeaders=host, Signature={S}",
    f"password='ab\\'{S}'",
]
ORDINARY = [
    "Unexpected token: end of input",
    "the column key: STRING",
    "http://es:9200/a@b",
    "key.deserializer=org.x",
    "The token expired: renew it",
    "Set sasl.oauthbearer.method to oidc",
    "primary_key=id",
    "partition_key: user_id",
    "invalid token at line 3",
    "headrace.errors.X: host=h port=9200 key=5",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_secret_in_foreign_text_is_hidden(text: str) -> None:
    shown = without_secrets(text)
    assert S not in shown
    assert "***" in shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize("text", ORDINARY)
def test_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "text", ["a", "a.", "x=1 ", "password ", "://", '{"a":"b",', "(a,", "-----BEGIN PRIVATE KEY-----"]
)
def test_the_filter_takes_long_texts(text: str) -> None:
    # With a search that is quadratic, this is minutes.
    without_secrets(text * 20_000)


def test_what_a_connection_has_as_secrets_is_hidden_everywhere() -> None:
    extra = {"sasl.oauthbearer.config": "client_secret=kL9-config-value", "region": "eu-west-1"}
    fields = {"conn_type": "kafka", "login": "me", "password": "pQ7-of-the-connection", "extra": extra}
    from_text("k", json.dumps(fields))
    text = "cannot log in with pQ7-of-the-connection or kL9-config-value in eu-west-1"
    assert without_secrets(text) == "cannot log in with *** or *** in eu-west-1"
    # A word as a password of a test would make all texts unreadable.
    from_text("k", json.dumps({"conn_type": "postgres", "password": "airflow"}))
    assert without_secrets("the airflow database") == "the airflow database"


def test_an_error_hides_the_secrets_in_its_text_and_its_causes() -> None:
    def fail() -> None:
        try:
            try:
                raise ConnectionError(f"postgresql://me:{secret}@db is away")
            except ConnectionError as inner:
                raise RuntimeError(f"401: client_secret={secret}") from inner
        except RuntimeError as error:
            raise HeadraceError(f"No answer: {error}.", remedy=f"Not token={secret}.") from error

    # Not in the lines of the source, which a traceback shows.
    secret = S
    with pytest.raises(HeadraceError) as raised:
        fail()
    error = raised.value
    shown = "".join(traceback.format_exception(error))
    assert S not in shown + error.what + str(error.remedy) + repr(error)
    assert "is away" in shown


def test_the_log_of_a_process_has_no_secrets_also_in_tracebacks() -> None:
    secret = S
    try:
        raise RuntimeError(f"password={secret}")
    except RuntimeError as error:
        found = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed with token=%s", (S,), found)
    line = CleanFormatter("%(message)s").format(record)
    assert S not in line
    assert "failed with token=***" in line
    assert "RuntimeError: password=***" in line
