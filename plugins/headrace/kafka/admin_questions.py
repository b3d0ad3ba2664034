"""Questions to Kafka by an admin client, and why one of them has no answer: by the server's name and the client's own
words, where librdkafka's future says no more than "timed out".
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

# A client that has heard of a broken connection has tried again several times by then: another broker would have
# answered.
_HOPE_SECONDS = 3.0
_SLACK_SECONDS = 5.0
# librdkafka counts in its errors: the same one would be another each time.
_COUNTED = re.compile(r" \(after \d+ms in state [A-Z_]+(, \d+ identical error\(s\) suppressed)?\)")


class AdminQuestions:
    """An admin client of an input's cluster. One thread's."""

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
        """Wait until all are done, but no longer than ``seconds`` and a little, and shorter where no broker can be
        reached."""
        began = time.monotonic()
        self._heard.clear()
        open_ones = set(futures)
        while open_ones and time.monotonic() < began + seconds + _SLACK_SECONDS:
            self._poll()
            _, open_ones = concurrent.futures.wait(open_ones, timeout=0.1)
            if self._heard and time.monotonic() > began + _HOPE_SECONDS:
                return

    def not_asked(self, error: BaseException) -> KafkaNotAskedError:
        """The error that says which servers did not answer, and why."""
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
        # That all are down says less than what was heard of one.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._heard:
            self._heard[:] = [plain(error)]


def error_text(error: BaseException) -> str:
    """A Kafka error's name and text, any other's text."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return plain(inner) if isinstance(inner, KafkaError) else str(error) or type(error).__name__


def plain(error: KafkaError) -> str:
    """Its name and text, the same for the same error."""
    return f"{error.name()}: {_COUNTED.sub('', error.str())}"
