#!/usr/bin/env python3
"""Write .env for docker-compose.yaml: a random secret for each variable. An existing .env is left as it is."""

from __future__ import annotations

import base64
import os
import secrets
import sys
from pathlib import Path

PASSWORDS = (
    "POSTGRES_PASSWORD",
    "AIRFLOW_DATABASE_PASSWORD",
    "LEDGER_PASSWORD",
    "ELASTIC_PASSWORD",
    "HEADRACE_ELASTIC_PASSWORD",
    "AIRFLOW_ADMIN_PASSWORD",
    "AIRFLOW_API_SECRET",
    "AIRFLOW_JWT_SECRET",
    "HEADRACE_SECRET_KEY",
    "SPARK_SECRET",
)
"""Of hexadecimal digits: they stand in URLs and in JSON."""


def env_text() -> str:
    """The file's content."""
    lines = [f"{name}={secrets.token_hex(32)}" for name in PASSWORDS]
    lines.append(f"AIRFLOW_FERNET_KEY={base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write it, readable by its owner alone."""
    path = Path(__file__).resolve().parents[1] / ".env"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists and is left as it is.")
    with os.fdopen(descriptor, "w") as file:
        file.write(env_text())
    print(f"Wrote {path}. Airflow's login is admin with its AIRFLOW_ADMIN_PASSWORD.")


if __name__ == "__main__":
    main()
