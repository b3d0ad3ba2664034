"""Signatures of requests to Amazon OpenSearch Service: who signs, and the headers that botocore makes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.connections import Connection
from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.time_limit import within

AWS_EXTRA = frozenset({"aws_region", "aws_service", "aws_profile", "aws_session_token"})
"""The keys of a connection's extra by which requests to an Amazon OpenSearch Service domain are signed."""


@dataclass(frozen=True, slots=True)
class AwsIdentity:
    """Who signs, and for which region. Without keys they come from where botocore looks for them."""

    region: str
    service: str = "es"
    profile: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, connection: Connection, extra: Mapping[str, Any]) -> Self | None:
        """The identity of a connection, whose login and password are its keys; None if it has no ``aws_region``.

        Raises IndexingOptionsError: the settings are incomplete, or there is another credential beside them.
        """
        given = sorted(name for name in AWS_EXTRA if extra.get(name))
        if not extra.get("aws_region"):
            if given:
                raise IndexingOptionsError(
                    f"The extra of connection {connection.id!r} has {', '.join(given)} and no aws_region.",
                    remedy="Give the region of the domain as aws_region.",
                )
            return None
        if others := [name for name in ("api_key", "bearer_token") if extra.get(name)]:
            raise IndexingOptionsError(
                f"Connection {connection.id!r} has aws_region and {', '.join(others)}.", remedy="Keep one credential."
            )
        if bool(connection.login) != bool(connection.password) or (connection.login and extra.get("aws_profile")):
            raise IndexingOptionsError(
                f"Connection {connection.id!r} has aws_region, and neither both keys nor none.",
                remedy="Give the access key as login and the secret key as password; or aws_profile; or none of these, "
                "so that the role of the host is used.",
            )
        return cls(
            region=str(extra["aws_region"]),
            service=str(extra.get("aws_service") or "es"),
            profile=extra.get("aws_profile"),
            access_key=connection.login,
            secret_key=connection.password,
            session_token=extra.get("aws_session_token"),
        )


_SECONDS = 30.0


class KeysUnavailableError(Exception):
    """Temporary keys could not be renewed. It may pass."""


class RequestSigner:
    """Makes the headers of requests that are signed by AWS Signature Version 4. Temporary keys are renewed by botocore.

    botocore is the extra ``aws``, and must be on the executors' hosts too.

    Raises IndexingOptionsError if botocore is missing or finds no keys.
    """

    def __init__(self, identity: AwsIdentity) -> None:
        try:
            from botocore.credentials import Credentials
            from botocore.exceptions import BotoCoreError
            from botocore.session import Session
        except ImportError as error:
            raise IndexingOptionsError(
                "The connection has aws_region, and botocore is not installed.",
                remedy="Install headrace[aws] wherever batches and executors run.",
            ) from error
        if identity.access_key:
            self._credentials: Any = Credentials(identity.access_key, identity.secret_key, identity.session_token)
        else:
            try:
                self._credentials = within(
                    _SECONDS, identity, lambda: Session(profile=identity.profile).get_credentials()
                )
            except (BotoCoreError, TimeoutError) as error:
                raise IndexingOptionsError(f"botocore cannot look for AWS keys: {error}.") from error
        if self._credentials is None:
            raise IndexingOptionsError(
                "botocore finds no AWS keys on this host.",
                remedy="Give the host a role, or aws_profile in the connection's extra, or the keys as its login and "
                "password.",
            )
        self._identity = identity

    def headers(self, method: str, url: str, body: bytes | None) -> dict[str, str]:
        """The headers that sign this request. ``body`` is as sent, so compressed if it is. Raises
        KeysUnavailableError."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError, ClientError

        request = AWSRequest(method, url, data=body)
        try:
            # Temporary keys are asked for again before they end; for that STS has a minute, several times.
            is_due = getattr(self._credentials, "refresh_needed", lambda: False)()
            get = self._credentials.get_frozen_credentials
            frozen = within(_SECONDS, self._identity, get) if is_due else get()
        except (BotoCoreError, ClientError, TimeoutError) as error:
            raise KeysUnavailableError(
                f"on host {socket.gethostname()} the AWS keys were not renewed: {error}"
            ) from error
        SigV4Auth(frozen, self._identity.service, self._identity.region).add_auth(request)
        return dict(request.headers.items())
