"""A definition is stored in clear and stands on command lines: no part of it takes a secret, and none repeats one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.stream import (
    ConsoleOutput,
    ElasticsearchOutput,
    KafkaInput,
    Listener,
    ReceiverInput,
    SparkSettings,
    Storage,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.stream import ParameterError, merged_parameters


def stream(ledger: str) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="h:1", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage="/storage",
        ledger=ledger,
    )


@pytest.mark.parametrize(
    "ledger",
    [
        "postgresql://u:hunter2@h/db",
        "postgresql://u@h/db?password=hunter2",
        "postgresql+psycopg://u@h/db?sslmode=require&SSLPassword=hunter2",
    ],
)
def test_the_ledgers_url_takes_no_secret(ledger: str) -> None:
    with pytest.raises(StreamDefinitionError, match=r"ledger holds a password.*connection:") as refused:
        stream(ledger)
    assert "hunter2" not in str(refused.value)


def test_the_ledgers_url_takes_other_options() -> None:
    assert stream("postgresql+psycopg://u@h/db?sslmode=verify-full&sslkey=/etc/key.pem&passfile=/etc/pgpass")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.hadoop.fs.s3a.secret.key", "hunter2"),
        ("spark.hadoop.fs.s3a.access.key", "hunter2"),
        ("spark.hadoop.fs.s3a.session.token", "hunter2"),
        ("spark.ssl.keyStorePassword", "hunter2"),
        ("spark.driver.extraJavaOptions", "-Xss4m -Djavax.net.ssl.trustStorePassword=hunter2"),
        ("spark.hadoop.fs.azure.account.key.box.dfs.core.windows.net", "hunter2"),
        ("spark.hadoop.fs.azure.sas.logs.box.blob.core.windows.net", "hunter2"),
        ("spark.hadoop.fs.azure.signed.url", "sv=2024-11-04&sr=c&sig=hunter2"),
        ("spark.hadoop.fs.gs.auth.service.account.private.key", "hunter2"),
        ("spark.driver.extraJavaOptions", "-Dfs.azure.account.key.box.dfs.core.windows.net=hunter2"),
        ("spark.hadoop.fs.proxy", "http://me:hunter2@proxy:8080"),
        ("spark.executorEnv.API_KEY", "hunter2"),
        ("spark.executorEnv.DB_PWD", "hunter2"),
        ("spark.executorEnv.LDAP_PASS", "hunter2"),
        ("spark.executorEnv.PASSPHRASE", "hunter2"),
        ("spark.executorEnv.CREDENTIALS", "hunter2"),
        ("spark.executorEnv.AUTHORIZATION", "hunter2"),
        ("spark.executorEnv.AIRFLOW_CONN_DB", "postgres://me:hunter2@h/db"),
        ("spark.executorEnv.AIRFLOW_CONN_DB", '{"conn_type": "postgres", "password": "hunter2"}'),
        ("spark.executorEnv.DB", '{"host": "h", "login": {"pwd": "hunter2"}}'),
        ("spark.executorEnv.DB", "host=h user=me password=hunter2"),
        ("spark.executorEnv.QUEUE", "Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey=hunter2"),
        ("spark.executorEnv.HEADER", "Bearer hunter2"),
        ("spark.executorEnv.PEM", "-----BEGIN RSA PRIVATE KEY-----hunter2"),
        ("spark.executorEnv.GOOGLE_APPLICATION_CREDENTIALS", "hunter2"),
        ("spark.jars", "https://h/a.jar?X-Amz-Signature=hunter2"),
        ("spark.jars", "https://hunter2@h/a.jar"),
        ("spark.executorEnv.DD_APP_KEY", "hunter2"),
        ("spark.hadoop.fs.obs.access.key", "hunter2"),
        ("spark.hadoop.fs.obs.access", "hunter2"),
        ("spark.executorEnv.HOOK", "https://hooks.slack.com/services/T/B/hunter2"),
        ("spark.executorEnv.SLACK_WEBHOOK", "hunter2"),
    ],
)
def test_sparks_settings_take_no_secret(name: str, value: str) -> None:
    with pytest.raises(StreamDefinitionError, match=rf"conf {name} holds a secret.*spark-defaults") as refused:
        SparkSettings(conf={name: value, "spark.executor.memory": "1g"})
    assert "hunter2" not in str(refused.value)
    assert "memory" not in str(refused.value)


def test_a_provider_and_the_path_of_a_key_are_no_secrets() -> None:
    """The provider is one of credentials."""
    provider = "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider"
    conf = {
        "spark.hadoop.fs.s3a.aws.credentials.provider": provider,
        "spark.security.credentials.hive.enabled": "false",
        "spark.hadoop.fs.azure.account.keyprovider.box": "org.apache.hadoop.fs.azurebfs.services.SimpleKeyProvider",
        "spark.hadoop.fs.gs.auth.service.account.keyfile": "/etc/key.p12",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.executorEnv.GOOGLE_APPLICATION_CREDENTIALS": "/etc/headrace/key.json",
        "spark.kubernetes.executor.secretKeyRef.DB_PWD": "shop:password",
        "spark.io.encryption.keySizeBits": "256",
        "spark.authenticate": "true",
        "spark.authenticate.secret.file": "/run/secret",
        "spark.sql.shuffle.partitions": "8",
        "spark.sql.session.timeZone": "UTC",
        "spark.ssl.keyStore": "/etc/keys",
        "spark.acls.enable": "true",
        "spark.jars": "abfss://box@account.dfs.core.windows.net/a.jar",
    }
    assert SparkSettings(conf=conf).conf == conf


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@h/a.zip", "https://hunter2@h/a.zip", "https://h/a.zip?X-Amz-Signature=hunter2"]
)
def test_the_url_of_a_python_file_takes_no_login_or_signature(url: str) -> None:
    with pytest.raises(StreamDefinitionError, match=r"py_files hold a login or a signature in entry 1") as refused:
        SparkSettings(py_files=("/stream/a.py", url))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"token": "hunter2"}, "token"),
        ({"api_key": "hunter2"}, "api_key"),
        ({"db_password": "hunter2"}, "db_password"),
        ({"accessToken": "hunter2"}, "accessToken"),
        ({"account_key": "hunter2"}, "account_key"),
        ({"headers": {"Accept": "json", "Authorization": "Bearer hunter2"}}, r"headers\.Authorization"),
        ({"nodes": [{"clientSecret": "hunter2"}]}, r"nodes\.0\.clientSecret"),
        ({"nodes": ["https://me:hunter2@h/"]}, r"nodes\.0"),
        ({"db": '{"login": "me", "pwd": "hunter2"}'}, "db"),
        ({"header": "Bearer hunter2"}, "header"),
        ({"header": "basic bWU6aHVudGVyMg=="}, "header"),
        ({"header": "Basic dXNlcjpwYXNz"}, "header"),
    ],
)
def test_arguments_and_parameters_take_no_secret(arguments: dict[str, Any], path: str) -> None:
    def refused(make: Callable[[], object]) -> None:
        with pytest.raises(StreamDefinitionError, match=rf"a secret in {path}, and the definition is stored") as found:
            make()
        assert "hunter2" not in str(found.value)

    refused(lambda: ReceiverInput(id="orders", receiver="shop:Orders", arguments=arguments))
    refused(lambda: Listener(reference="shop:Pager", arguments=arguments))
    refused(lambda: Stream(**{**dict(stream("sqlite:////tmp/l.db")), "parameters": arguments}))


def test_arguments_that_only_sound_like_secrets_are_taken() -> None:
    arguments: dict[str, Any] = {
        "max_tokens": 500,
        "token": "",
        "tokenizer": "words",
        "token_url": "https://h/token",
        "signature_version": "s3v4",
        "keys": ["a"],
        "plan": "basic monthly plan",
        "side": "Bearer certificates",
        "url": "https://h/",
    }
    assert ReceiverInput(id="orders", receiver="shop:Orders", arguments=arguments).arguments == arguments


SECRETS: list[dict[str, Any]] = [
    {"DD_APP_KEY": "hunter2"},
    {"DD_API_KEY": "x"},
    {"slack": "https://hooks.slack.com/services/T/B/x"},
    {"fs.obs.access.key": "x"},
    {"fs.obs.access": "hunter2"},
    {"url": "postgresql://u:p@h"},
    {"appKey": "x"},
    {"APP_KEY": "x"},
    {"dbPass": "x"},
    {"a": {"passphrase": "x"}},
    {"auth": "u:hunter2"},
    {"auth": "hunter2"},
    {"basic_auth": "hunter2"},
    {"sas": "x"},
    {"SENTRY_DSN": "x"},
    {"sentryDsn": "x"},
    {"connection_string": "x"},
    {"connectionString": "x"},
    {"webhook": "https://x/y"},
    {"webhook_url": "https://x/y"},
    {"webhookUrl": "https://x"},
    {"WEBHOOK_URL": "h"},
    {"passwords": ["x"]},
    {"secrets": {"db": "x"}},
    {"db": "host=h password=x"},
    {"teams": "https://x.webhook.office.com/webhookb2/1@2/IncomingWebhook/3/4"},
    {"d": "https://discord.com/api/webhooks/1/abc"},
    {"k": "AKIAIOSFODNN7EXAMPLE"},
    {"password": 1234567},
    {"credential": "x"},
    {"access_token": "x"},
    {"tokens": {"password": "x"}},
    {"clientSecret": "x"},
    {"private_key": "x"},
    {"jaas.config": "x"},
    {"stripe_key": "a1b2c3d4e5f6a7b8c9d0e1"},
    {"aws_access_key_id": "AKIAIOSFODNN7EXAMPLE"},
    {"access.key": "x"},
    {"fs": {"s3a": {"access.key": "x"}}},
    {"api_tokens": ["x"]},
    {"refresh_token": "x"},
    {"https://u:p@h": "x"},
    {"auth_key": "x"},
    {"license_key": "x"},
    {"spring.datasource.password": "x"},
    {"x": "xoxb-123456789012-abcdef"},
    {"PGPASSWORD": "x"},
    {"MYSQL_PWD": "x"},
    {"access": {"key": "hunter2"}},
    {"api": {"key": "x"}},
]

ORDINARY: list[dict[str, Any]] = [
    {"key.deserializer": "org.x.StringDeserializer"},
    {"key_column": "user_id"},
    {"partition_key": "user_id"},
    {"primary_key": "id"},
    {"token_provider": "corp.tokens:make"},
    {"token_url": "https://h/token"},
    {"secret_name": "db"},
    {"password_column": "pw_hash"},
    {"key": "user_id"},
    {"sort_key": "a"},
    {"auth": "oauth2"},
    {"auth_type": "basic"},
    {"authorization_url": "https://x/y"},
    {"credentials_path": "/etc/x.json"},
    {"private_key_path": "/etc/x.pem"},
    {"author": "me"},
    {"authenticated": "yes"},
    {"access": "public"},
    {"access_level": "read"},
    {"public_access": "none"},
    {"tokens": ["the", "a"]},
    {"stop_tokens": ["x"]},
    {"schema": "a STRING, password: STRING"},
    {"sql": "SELECT token FROM t WHERE a = 'x'"},
    {"pass_count": "2"},
    {"compass": "north"},
    {"signature_version": "s3v4"},
    {"monkey": "x"},
    {"keyboard": "x"},
    {"max_tokens": 5},
    {"foreign_key": "a"},
    {"routing_key": "orders.created"},
    {"session_key": "user_id"},
    {"bypass": "x"},
    {"dsn_name": "x"},
    {"webhook_enabled": "true"},
    {"webhook_id": "w1"},
    {"cache_key": "x"},
    {"topic": "auth.events"},
    {"email": "a@b.c"},
    {"url": "https://es:9200/idx"},
    {"token": ""},
    {"n": "12345678901234567890"},
    {"hash": "a1b2c3d4e5f6a7b8c9d0e1"},
    {"row_key": "order-2026-0001"},
    {"api_version": "2"},
    {"application": "shop"},
    {"key_format": "json"},
    {"map_key": "x"},
    {"hotkey": "x"},
    {"consumer_key": "user_id"},
    {"mask": "password"},
    {"columns": ["password", "token"]},
    {"drop": {"columns": ["password"]}},
    {"passenger": "Ann"},
    {"secretary": "Ann"},
    {"turkey": "x"},
    {"assign": "a=b"},
]


@pytest.mark.parametrize("value", SECRETS, ids=str)
def test_one_list_of_secrets_counts_for_definitions_and_runs(value: dict[str, Any]) -> None:
    """Runs have it for their parameters."""
    declared = Stream(**{**dict(stream("sqlite:////tmp/l.db")), "parameters": {}})
    for refuse in (
        lambda: ReceiverInput(id="orders", receiver="shop:Orders", arguments=value),
        lambda: Listener(reference="shop:Pager", arguments=value),
        lambda: Stream(**{**dict(declared), "parameters": value}),
        lambda: merged_parameters(declared, value),
    ):
        with pytest.raises((StreamDefinitionError, ParameterError), match="a secret in") as found:
            refuse()
        assert "u:p@" not in str(found.value)


@pytest.mark.parametrize("value", ORDINARY, ids=str)
def test_what_only_sounds_like_a_secret_is_taken(value: dict[str, Any]) -> None:
    declared = Stream(**{**dict(stream("sqlite:////tmp/l.db")), "parameters": value})
    assert merged_parameters(declared, value) == value
    assert ReceiverInput(id="orders", receiver="shop:Orders", arguments=value).arguments == value


@pytest.mark.parametrize("servers", ["me:hunter2@h:9092", "h:9092,SASL_SSL://me:hunter2@i:9092"])
def test_kafkas_servers_take_no_login(servers: str) -> None:
    with pytest.raises(StreamDefinitionError, match=r"bootstrap_servers.*Airflow connection") as refused:
        KafkaInput(bootstrap_servers=servers, topics="flights")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "host", ["https://me:hunter2@h:9200", "https://h:9200/?api_key=hunter2", "https://h/?X-Amz-Signature=hunter2"]
)
def test_elasticsearchs_hosts_take_no_login(host: str) -> None:
    with pytest.raises(StreamDefinitionError, match=r"hosts hold a login.*Airflow connection") as refused:
        ElasticsearchOutput(hosts=host, index="flights")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/x",
        "abfs://box@account/x?client_secret=hunter2",
        "az://b/x?sig=hunter2",
        "s3://b/x?token_id=hunter2",
    ],
)
def test_a_stores_url_takes_no_secret(url: str) -> None:
    with pytest.raises(StreamDefinitionError, match=r"url holds a secret.*environment") as refused:
        Storage(url=url)
    assert "hunter2" not in str(refused.value)


def test_a_stores_url_may_name_a_container_and_options() -> None:
    assert Storage(url="abfs://box@account.dfs.core.windows.net/x")
    assert Storage(url="s3://bucket/x?region=eu-west-1&endpoint_override=https%3A%2F%2Fminio%3A9000")
