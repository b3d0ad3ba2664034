"""An admin client for queries to Kafka that reports why a query has no answer.

The error names the servers and the client's last error, where librdkafka's future reports only "timed out".
"""

from __future__ import annotations

import concurrent.futures
import re
import time
from collections.abc import Collection
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from headrace.kafka.client_settings import admin_config
from headrace.kafka.errors import KafkaNotAskedError
from headrace.stream.inputs import KafkaInput

# By then a client with a broken connection has tried again several times: another broker would have answered.
_HOPE_SECONDS = 3.0
_SLACK_SECONDS = 5.0
# librdkafka puts times and counts in its errors, which make the text of the same error differ each time.
_COUNTED = re.compile(r" \(after \d+ms in state [A-Z_]+(, \d+ identical error\(s\) suppressed)?\)")


class AdminQuestions:
    """An admin client of an input's cluster. Not thread-safe."""

    def __init__(self, source: KafkaInput, admin: Any = None) -> None:
        """Raises ClientSettingError, ConnectionNotFoundError or ConnectionFormatError."""
        self.source = source
        self._heard: list[str] = []
        config: dict[str, Any] = dict(admin_config(source)) if admin is None else {}
        self.servers = str(config.get("bootstrap.servers") or source.bootstrap_servers or source.connection)
        config["error_cb"] = self._on_error
        self.admin = AdminClient(config) if admin is None else admin
        self._polls = admin is None

    def wait(self, futures: Collection[concurrent.futures.Future[Any]], seconds: float) -> None:
        """Wait until all are done, but not much longer than ``seconds``, and about 3 s if the client reports errors."""
        began = time.monotonic()
        self._heard.clear()
        open_ones = set(futures)
        while open_ones and time.monotonic() < began + seconds + _SLACK_SECONDS:
            self._poll()
            _, open_ones = concurrent.futures.wait(open_ones, timeout=0.1)
            if self._heard and time.monotonic() > began + _HOPE_SECONDS:
                return

    def not_asked(self, error: BaseException) -> KafkaNotAskedError:
        """The error that names the servers that did not answer, and why."""
        self._poll()
        why = self._heard[-1] if self._heard else error_text(error)
        return KafkaNotAskedError(
            f"Kafka at {self.servers} cannot be asked: {why}.",
            remedy="See to the servers, or to the address and the security settings of "
            + (f"connection {self.source.connection!r}." if self.source.connection else "bootstrap_servers."),
        )

    def _poll(self) -> None:
        if self._polls:
            self.admin.poll(0)

    def _on_error(self, error: KafkaError) -> None:
        # "All brokers down" says less than the error of one broker.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._heard:
            self._heard[:] = [plain(error)]


def error_text(error: BaseException) -> str:
    """A Kafka error's name and text, any other's text."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return plain(inner) if isinstance(inner, KafkaError) else str(error) or type(error).__name__


def plain(error: KafkaError) -> str:
    """The error's name and text, without times and counts."""
    return f"{error.name()}: {_COUNTED.sub('', error.str())}"
