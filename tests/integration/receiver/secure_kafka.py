"""A broker that asks for a log-in: by SCRAM, PLAIN, a certificate or a token, each with ACLs."""

from __future__ import annotations

import json
import subprocess
import time
from functools import cached_property
from pathlib import Path

import requests
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from tests.support.certificates import write_certificate
from tests.support.token_server import AUDIENCE, CLIENT_ID, CLIENT_SECRET, TokenServer

from headrace.devstack.jars import find_java
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import LOOPBACK, free_port

USER = "headrace"
PASSWORD = "correct horse battery staple"
STORE_PASSWORD = "changeit"
PLAIN_USER = "plain-headrace"
CERTIFICATE_USER = "CN=certified-headrace"


class SecureKafka:
    """A broker with four listeners: one that asks for nothing, for the tests themselves; one for passwords, one for
    certificates, both with TLS; and one for tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = TokenServer()
        self.ca = folder / "ca.pem"
        self.store = folder / "broker.p12"
        self.certificate = folder / "client.pem"
        self.key = folder / "client.key"
        self._make_certificate()
        write_certificate(self.certificate, self.key, CERTIFICATE_USER.removeprefix("CN="))
        ports: list[int] = []
        for _ in range(5):
            ports.append(free_port(ports))
        plain, controller, self.port, self.certificate_port, self.token_port = ports
        self.server = KafkaServer(
            folder / "kafka",
            port=plain,
            controller_port=controller,
            properties=self._properties(plain, controller),
            jvm_options=[f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.tokens.url}/keys"],
        )

    def _make_certificate(self) -> None:
        keytool = str(find_java().executable.with_name("keytool"))
        common = ["-keystore", str(self.store), "-storepass", STORE_PASSWORD, "-alias", "broker"]
        made = ["-genkeypair", *common, "-storetype", "PKCS12", "-keyalg", "RSA", "-validity", "2"]
        made += ["-dname", "CN=localhost", "-ext", f"SAN=DNS:localhost,IP:{LOOPBACK}"]
        subprocess.run([keytool, *made], check=True, capture_output=True)
        subprocess.run(
            [keytool, "-exportcert", "-rfc", *common, "-file", str(self.ca)], check=True, capture_output=True
        )

    def _properties(self, plain: int, controller: int) -> dict[str, str]:
        named = {
            "PLAINTEXT": plain,
            "SECURE": self.port,
            "CERTIFICATES": self.certificate_port,
            "TOKENS": self.token_port,
        }
        listeners = ",".join(f"{name}://{LOOPBACK}:{port}" for name, port in named.items())
        security = "org.apache.kafka.common.security"
        tls = {
            f"listener.name.{name}.ssl.keystore.{key}": value
            for name in ("secure", "certificates")
            for key, value in {"location": str(self.store), "password": STORE_PASSWORD, "type": "PKCS12"}.items()
        }
        return {
            "listeners": f"{listeners},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CERTIFICATES:SSL,TOKENS:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            **tls,
            "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
            "listener.name.secure.scram-sha-512.sasl.jaas.config": f"{security}.scram.ScramLoginModule required;",
            "listener.name.secure.plain.sasl.jaas.config": (
                f'{security}.plain.PlainLoginModule required user_{PLAIN_USER}="{PASSWORD}";'
            ),
            "listener.name.certificates.ssl.client.auth": "required",
            "listener.name.certificates.ssl.truststore.type": "PEM",
            "listener.name.certificates.ssl.truststore.location": str(self.certificate),
            "listener.name.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.tokens.oauthbearer.sasl.jaas.config": (
                f"{security}.oauthbearer.OAuthBearerLoginModule required;"
            ),
            "listener.name.tokens.oauthbearer.sasl.server.callback.handler.class": (
                f"{security}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            # A connection ends with its token, unless the client logs in again with a new one.
            "listener.name.tokens.oauthbearer.connections.max.reauth.ms": "600000",
            # Not below the mechanism's prefix: there Kafka 4.1 finds them not, and checks no signature.
            "listener.name.tokens.sasl.oauthbearer.jwt.validator.class": (f"{security}.oauthbearer.BrokerJwtValidator"),
            "listener.name.tokens.sasl.oauthbearer.jwks.endpoint.url": f"{self.tokens.url}/keys",
            "listener.name.tokens.sasl.oauthbearer.expected.audience": AUDIENCE,
            "listener.name.tokens.sasl.oauthbearer.expected.issuer": self.tokens.url,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # The plain listener is the tests' own; only users of the others need rights.
            "super.users": "User:ANONYMOUS",
        }

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.server.bootstrap_servers})

    def set_password(self, password: str) -> None:
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        changed = self.admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, info, password.encode())])
        changed[USER].result()

    def allow(self, kind: ResourceType, prefix: str, *operations: AclOperation, user: str = USER) -> None:
        bindings = [
            AclBinding(
                kind, prefix, ResourcePatternType.PREFIXED, f"User:{user}", "*", operation, AclPermissionType.ALLOW
            )
            for operation in operations
        ]
        for created in self.admin.create_acls(bindings).values():
            created.result()

    def withdraw(self, kind: ResourceType, operation: AclOperation) -> None:
        every = AclBindingFilter(
            kind, None, ResourcePatternType.ANY, f"User:{USER}", None, operation, AclPermissionType.ANY
        )
        for deleted in self.admin.delete_acls([every]).values():
            assert deleted.result()

    def connection(self, **changes: str) -> str:
        """The Airflow connection as the processes of a stream get it: by SCRAM."""
        return _connection(
            self.port,
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": USER,
                "sasl.password": PASSWORD,
                "ssl.ca.location": str(self.ca),
                **changes,
            },
        )

    def by_plain(self) -> str:
        return self.connection(**{"sasl.mechanism": "PLAIN", "sasl.username": PLAIN_USER})

    def by_certificate(self, **changes: str) -> str:
        return _connection(
            self.certificate_port,
            {
                "security.protocol": "SSL",
                "ssl.ca.location": str(self.ca),
                "ssl.certificate.location": str(self.certificate),
                "ssl.key.location": str(self.key),
                **changes,
            },
        )

    def by_oidc(self, **changes: str) -> str:
        """librdkafka asks the token server itself."""
        return _connection(
            self.token_port,
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": CLIENT_ID,
                "sasl.oauthbearer.client.secret": CLIENT_SECRET,
                "sasl.oauthbearer.token.endpoint.url": f"{self.tokens.url}/token",
                "sasl.oauthbearer.scope": "api://brokers/.default",
                **changes,
            },
        )

    def by_callback(self, function: str, **changes: str) -> str:
        given = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER", "oauth_cb": function}
        return _connection(self.token_port, {**given, "sasl.oauthbearer.config": self.tokens.url, **changes})


def _connection(port: int, extra: dict[str, str]) -> str:
    return json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": f"{LOOPBACK}:{port}", **extra}})


def token_by_http(url: str | None) -> tuple[str, float]:
    """A callback as a connection names it: asks the token server of its ``sasl.oauthbearer.config``."""
    answer = requests.post(
        f"{url}/token", {"grant_type": "client_credentials"}, auth=(CLIENT_ID, CLIENT_SECRET), timeout=10
    )
    fields = answer.json()
    return fields["access_token"], time.time() + fields["expires_in"]
