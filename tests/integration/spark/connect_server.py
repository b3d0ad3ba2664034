"""A Spark Connect server as a receiver job has it, in a process of its own, and clients of it in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from headrace.ledger import Ledger
from headrace.ledger.tables import JobLease
from headrace.spark import job_token
from headrace.spark.job_token import derive_token

SECRET = "a secret for the tests"
APPLICATION = ("connect-test", 1)
TOKEN = derive_token(SECRET, *APPLICATION)

_SERVER = """
import sys
from headrace.spark.receiving.receiver_application import start_application
from headrace.stream import Stream

application = start_application(Stream.from_json(sys.argv[1]), token=sys.argv[2])
print(application.connect_url, flush=True)
sys.stdin.read()
application.spark.stop()
"""


class ConnectServer:
    """A server of this stream, from entering on; its log is in ``folder``.

    ``own`` of its environment is not its clients'.
    """

    def __init__(self, definition: str, folder: Path, **own: str) -> None:
        self.printed = ""
        self._log = folder / "server.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, definition, TOKEN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**_environment(), **own},
            )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()
        if not self._url:
            self.stop()
            raise AssertionError(self._log.read_text()[-3000:])
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, source: str, *arguments: str, seconds: float = 180, **own: str) -> subprocess.CompletedProcess[str]:
        """Run the source of a client, with the server's URL and token before its arguments; when it has ended well.

        ``own`` is added to its environment. What it prints is added to `printed`.
        """
        client = subprocess.run(
            [sys.executable, "-c", source, self._url, TOKEN, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**_environment(), **own},
        )
        self.printed += client.stdout + client.stderr
        assert client.returncode == 0, client.stderr[-3000:]
        return client

    def serve(self, ledger: Ledger, job: JobLease) -> None:
        """Let this job's batches run here. Their commands need ``HEADRACE_SECRET_KEY`` (`SECRET`)."""
        attributes: dict[str, Any] = {
            "connect_url": self._url, "batch_slots": 2, job_token.APPLICATION: list(APPLICATION)
        }  # fmt: skip
        ledger.jobs.update(job, state="running", attributes=attributes)

    def stop(self) -> None:
        """End the application; its log of events is complete then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SPARK_CONNECT")}
