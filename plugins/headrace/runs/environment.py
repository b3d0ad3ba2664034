"""Builds the environment of the processes that Airflow starts for a stream.

They get the connections of their stream and none of Airflow's other settings: whoever may run a transform need not read
the metadata database's password. Secrets are passed in the environment, never on a command line, where every user of
the machine could read them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.configuration import conf

from headrace.connections import variable_name
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.stream import Stream

SECRET_KEY_VARIABLE = "HEADRACE_SECRET_KEY"  # noqa: S105 - the variable's name, not a secret

# Separates this use of the key from others: Airflow encrypts with the same key.
_PURPOSE = b"headrace: what receiver jobs and their batches share"

# Airflow's own settings, other DAGs' connections and variables, and the task's channel to its supervisor.
_WITHHELD_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "AIRFLOW_CTX_", "_AIRFLOW", "__AIRFLOW")
# With this variable pyspark's modules were compiled again at every import, two seconds each time.
_WITHHELD = {"PYTHONDONTWRITEBYTECODE"}


class SecretKeyUndefinedError(HeadraceError):
    """Airflow is configured with neither ``[headrace] secret_key`` nor ``[core] fernet_key``."""


def child_environment(stream: Stream, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment for a process of ``stream``: ``base`` (by default this process's) without Airflow's
    variables, plus those that the process needs.

    Raises AirflowNotFoundException if a connection is not defined, and SecretKeyUndefinedError.
    """
    base = os.environ if base is None else base
    environment = {
        name: value for name, value in base.items() if name not in _WITHHELD and not name.startswith(_WITHHELD_PREFIXES)
    }
    for conn_id in stream.connection_ids:
        environment[variable_name(conn_id)] = connection_json(conn_id)
    environment[SECRET_KEY_VARIABLE] = secret_key(stream.application)
    # Executors and the driver run the Python that runs Airflow; by default they pick another one, without pyarrow.
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # A task's PATH may lack the Python environment's own scripts, such as spark-submit.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    if stream.spark.is_local:
        # Spark's user interface and its other ports have no password, so they listen on this machine only.
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # So that lines appear in the log as soon as they are printed.
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


@contextmanager
def connections_in_environment(stream: Stream) -> Iterator[None]:
    """Set the connections of the stream's inputs in this process's environment for the length of a ``with`` block. Code
    that queries Kafka within a task reads them there.

    Raises AirflowNotFoundException if a connection is not defined.
    """
    names = {variable_name(source.connection): source.connection for source in stream.kafka_inputs if source.connection}
    found = {name: connection_json(conn_id) for name, conn_id in names.items()}
    before = {name: os.environ.get(name) for name in found}
    os.environ.update(found)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def connection_json(conn_id: str) -> str:
    """The connection in Airflow's JSON form, as an ``AIRFLOW_CONN_…`` variable holds it."""
    from airflow.sdk.bases.hook import BaseHook

    return BaseHook.get_connection(conn_id).as_json()


def secret_key(name: str) -> str:
    """The secret that an application (`Stream.application`) and its batches share: 64 hexadecimal digits, different for
    each name.

    It is derived from ``[headrace] secret_key``, else from ``[core] fernet_key``, and does not reveal them: with the
    fernet key itself, whoever writes a transform could read all of Airflow's connections.

    Raises:
        SecretKeyUndefinedError: neither key is set.
    """
    key = conf.get("headrace", "secret_key", fallback="") or conf.get("core", "fernet_key", fallback="")
    if not key:
        raise SecretKeyUndefinedError(
            "Neither [headrace] secret_key nor [core] fernet_key is set, so the receiver job's Spark Connect server "
            "would have no token.",
            remedy="Set AIRFLOW__HEADRACE__SECRET_KEY to a long random string, the same on every worker.",
        )
    return hmac.new(key.encode(), b"%b\n%b" % (_PURPOSE, name.encode()), hashlib.sha256).hexdigest()
