"""The token of a stream's Spark Connect server.

Whoever reaches the server runs code in it, so each receiver application has its own token. Nobody stores it: the
driver and the batches derive it from a secret that both are given in their environment, so it stands neither on a
command line nor in the ledger, and a new epoch of the receiver job has a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from headrace.errors import HeadraceError

SECRET_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret

FINGERPRINT = "secret_fingerprint"
"""The attribute of a receiver job that has the fingerprint of its secret."""


class SecretKeyMissingError(HeadraceError):
    """The process was started without the secret that the tokens are derived from."""


def derive(secret: str, stream: str, job_epoch: int) -> str:
    """The token of one epoch of a stream's receiver job: 64 hexadecimal digits."""
    return hmac.new(secret.encode(), f"{stream}:{job_epoch}".encode(), hashlib.sha256).hexdigest()


def fingerprint(secret: str, stream: str) -> str:
    """What tells one secret from another, and nothing of either: a job's lease has it, so that a batch knows before it
    asks whether the job was started with the secret of now."""
    return hmac.new(secret.encode(), f"fingerprint of {stream}".encode(), hashlib.sha256).hexdigest()[:16]


def from_environment(stream: str, job_epoch: int, environment: Mapping[str, str] | None = None) -> str:
    """The token as the secret in the environment gives it.

    Raises SecretKeyMissingError when the variable is unset or empty: a guessable token is worse than none.
    """
    secret = (os.environ if environment is None else environment).get(SECRET_VARIABLE, "")
    if not secret:
        raise SecretKeyMissingError(
            f"The environment variable {SECRET_VARIABLE} is not set, so the Spark Connect token of stream "
            f"{stream!r} cannot be derived.",
            remedy=f"Set {SECRET_VARIABLE} to the same value for the receiver job and for its batches; "
            "Airflow's tasks set it themselves.",
        )
    return derive(secret, stream, job_epoch)
