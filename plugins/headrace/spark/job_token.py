"""The token of a receiver job's Connect server, and the secret that it is derived from.

A Connect server runs any code it is sent, so each application has its own token. The token is not stored: the driver
and the batches derive it from a secret in their environment. So it is neither on a command line nor in the ledger, and
each epoch of the job has a new token. The streams of a shared job have one application, so they have one token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.ledger.tables import JobRow


SECRET_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret


FINGERPRINT = "secret_fingerprint"
"""The attribute of a receiver job with the fingerprint of its secret."""


APPLICATION = "application"
"""The attribute of a receiver job in a shared job's application: that application's name and epoch."""


class SecretKeyMissingError(HeadraceError):
    """The process was started without the secret from which the tokens are derived."""


def derive_token(secret: str, name: str, epoch: int) -> str:
    """The token of one epoch of an application (`Stream.application`): 64 hexadecimal digits."""
    return hmac.new(secret.encode(), f"{name}:{epoch}".encode(), hashlib.sha256).hexdigest()


def secret_fingerprint(secret: str, name: str) -> str:
    """A fingerprint that distinguishes secrets and reveals nothing about them (16 hexadecimal digits).

    It is in the job's lease, so a batch can check before it connects whether the job was started with the same secret.
    """
    return hmac.new(secret.encode(), f"fingerprint of {name}".encode(), hashlib.sha256).hexdigest()[:16]


def token_from_environment(name: str, epoch: int) -> str:
    """The token derived from the secret in the environment.

    Raises SecretKeyMissingError if the variable is unset or empty: a guessable token is worse than none.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise SecretKeyMissingError(
            f"The environment variable {SECRET_VARIABLE} is not set, so the Spark Connect token of {name!r} cannot be "
            "derived.",
            remedy=f"Set {SECRET_VARIABLE} to the same value for the receiver job and for its batches; "
            "Airflow's tasks set it themselves.",
        )
    return derive_token(secret, name, epoch)


def token_of_job(job: JobRow) -> str:
    """The token of the application in which a receiver job runs. Raises SecretKeyMissingError."""
    name, epoch = job.attributes.get(APPLICATION) or (job.stream, job.epoch)
    return token_from_environment(name, epoch)
