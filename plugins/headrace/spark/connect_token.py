"""Derives the token of a stream's Spark Connect server.

A client of the server can run code in it, so each receiver application has its own token. The token is not stored: the
driver and the batches derive it from a secret in their environment. So it is neither on a command line nor in the
ledger, and each epoch of the receiver job has a new token.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from headrace.errors import HeadraceError

SECRET_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret

FINGERPRINT = "secret_fingerprint"
"""The attribute of a receiver job with the fingerprint of its secret."""


class SecretKeyMissingError(HeadraceError):
    """The process was started without the secret from which the tokens are derived."""


def derive(secret: str, stream_name: str, job_epoch: int) -> str:
    """The token of one epoch of a stream's receiver job: 64 hexadecimal digits."""
    return hmac.new(secret.encode(), f"{stream_name}:{job_epoch}".encode(), hashlib.sha256).hexdigest()


def fingerprint(secret: str, stream_name: str) -> str:
    """A fingerprint that distinguishes secrets and reveals nothing about them (16 hexadecimal digits).

    It is in the job's lease, so a batch can check before it connects whether the job was started with the same secret.
    """
    return hmac.new(secret.encode(), f"fingerprint of {stream_name}".encode(), hashlib.sha256).hexdigest()[:16]


def from_environment(stream_name: str, job_epoch: int) -> str:
    """The token derived from the secret in the environment.

    Raises SecretKeyMissingError if the variable is unset or empty: a guessable token is worse than none.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise SecretKeyMissingError(
            f"The environment variable {SECRET_VARIABLE} is not set, so the Spark Connect token of stream "
            f"{stream_name!r} cannot be derived.",
            remedy=f"Set {SECRET_VARIABLE} to the same value for the receiver job and for its batches; "
            "Airflow's tasks set it themselves.",
        )
    return derive(secret, stream_name, job_epoch)
