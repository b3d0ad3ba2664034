"""A Spark Connect server as a receiver job has it, in a process of its own, and clients of it in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOKEN = "connect-test"

_SERVER = """
import sys
from headrace.spark.receiver_application import start_application
from headrace.stream import Stream

application = start_application(Stream.from_json(sys.argv[1]), token=sys.argv[2])
print(application.connect_url, flush=True)
sys.stdin.read()
application.spark.stop()
"""


@dataclass(frozen=True)
class ConnectServer:
    """A server that runs."""

    url: str

    def run(self, source: str, *arguments: str, seconds: float = 180) -> subprocess.CompletedProcess[str]:
        """Run the source of a client, with the server's URL and token before its arguments; when it has ended well."""
        client = subprocess.run(
            [sys.executable, "-c", source, self.url, TOKEN, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=_environment(),
        )
        assert client.returncode == 0, client.stderr[-3000:]
        return client


@contextmanager
def connect_server(definition: str, folder: Path, **own: str) -> Iterator[ConnectServer]:
    """A server of this stream; ``own`` of its environment is not its clients', and its log is in ``folder``."""
    log_file = folder / "server.log"
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, definition, TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**_environment(), **own},
        ) as server,
    ):
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            url = server.stdout.readline().strip()
            assert url, log_file.read_text()[-3000:]
            yield ConnectServer(url)
        finally:
            server.stdin.close()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SPARK_CONNECT")}
