"""A listener that posts failed batches, dead letters, gaps and receivers' errors to a webhook.

    Stream(
        ...,
        listeners=Listener(reference="webhook:Webhook", connection="alerts"),
        spark=SparkSettings(py_files=(".../examples/webhook/webhook.py",)),
    )

The Airflow connection ``alerts`` has the webhook's whole URL as its host. It may have a token as its password, which is
sent as "Authorization: Bearer". A URL without a secret can be given as ``arguments={"url": "https://..."}`` instead.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import urllib3
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from headrace.connections import resolve
from headrace.listeners import BatchCompleted, DeadLetters, Gap, ReceiverError, StreamEvent, StreamListener
from headrace.stream_context import StreamContext


class PassingFailure(Exception):  # noqa: N818 - it is retried
    """The webhook's server does not answer, or has no time."""


class Webhook(StreamListener):
    """Posts events as JSON: ``kind``, ``text`` (one line, which Slack and others show) and ``event`` (all its fields).

    Delivery is at least once. A receiver of the webhook that must not act twice compares ``event.event_id``.

    Args:
        url: where to post.
        connection: the id of an Airflow connection, instead of ``url``.
        attempts: how often an event is tried. Then it is logged and counted as failed, and the next one follows.
        timeout_seconds: for one attempt.
        longest_wait_seconds: between two attempts.
    """

    def __init__(
        self,
        url: str | None = None,
        connection: str | None = None,
        *,
        attempts: int = 5,
        timeout_seconds: float = 10.0,
        longest_wait_seconds: float = 30.0,
    ) -> None:
        if (url is None) == (connection is None):
            raise ValueError("name either a url or a connection")
        self._url = url or ""
        self._connection = connection
        self._headers = {"Content-Type": "application/json"}
        # No retries of urllib3's own: tenacity decides.
        self._http = urllib3.PoolManager(timeout=urllib3.Timeout(total=timeout_seconds), retries=False)
        self._retrying = Retrying(
            retry=retry_if_exception_type(PassingFailure),
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=0.5, max=longest_wait_seconds),
            reraise=True,
        )

    def start(self, context: StreamContext) -> None:  # noqa: ARG002
        if self._connection is not None:
            found = resolve(self._connection)
            self._url = found.host or ""
            if found.password:
                self._headers["Authorization"] = f"Bearer {found.password}"

    def on_batch_completed(self, event: BatchCompleted) -> None:
        if not event.succeeded:
            reasons = "; ".join(f"{output}: {reason}" for output, reason in event.batch.failures.items())
            self._post("batch_failed", f"Batch {event.batch.batch_time_ms} of {event.stream} failed: {reasons}", event)

    def on_dead_letters(self, event: DeadLetters) -> None:
        where = f"output {event.output_id} of {event.stream}"
        exceeded = "" if event.exceeded is None else f", {event.exceeded}: it fails"
        self._post("dead_letters", f"{event.records} dead letters in {where}{exceeded}", event)

    def on_gap(self, event: Gap) -> None:
        offsets = f"{event.topic}[{event.partition}] {event.from_offset} to {event.until_offset}"
        self._post("gap", f"{event.stream} gave up offsets of {offsets}: {event.reason}", event)

    def on_receiver_error(self, event: ReceiverError) -> None:
        self._post("receiver_error", f"{event.receiver or event.input_id or event.stream}: {event.error}", event)

    def close(self) -> None:
        self._http.clear()

    def _post(self, kind: str, text: str, event: StreamEvent) -> None:
        self._retrying(self._send, {"kind": kind, "text": text, "event": asdict(event)})

    def _send(self, body: dict[str, Any]) -> None:
        try:
            answer = self._http.request("POST", self._url, json=body, headers=self._headers)
        except urllib3.exceptions.HTTPError as error:
            # Without the URL, which may hold a secret.
            raise PassingFailure(f"the webhook does not answer: {type(error).__name__}") from None
        if answer.status == 429 or answer.status >= 500:
            raise PassingFailure(f"the webhook answers {answer.status}")
        if answer.status >= 300:
            raise RuntimeError(f"the webhook refuses the event with {answer.status}: {answer.data[:200]!r}")
