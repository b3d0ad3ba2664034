"""Retries of requests to Elasticsearch: exponential backoff with full jitter, for a bounded time."""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.elasticsearch.errors import ElasticsearchUnavailableError, IndexingCancelledError
from headrace.elasticsearch.throttle import Throttle, is_throttled
from headrace.elasticsearch.transport import NoAnswerError, Response, Transport

log = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 30.0

REPORTED_AFTER_SECONDS = 2.0
REPORTED_AGAIN_AFTER_SECONDS = 30.0

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(slots=True)
class _Standstill:
    """A kind of time without progress: its limit, what it is called, and how long it lasts."""

    max_seconds: float
    state: str
    setting: str
    waits: int = 0
    since: float | None = None
    report_at: float = REPORTED_AFTER_SECONDS

    def end(self) -> None:
        self.waits, self.since, self.report_at = 0, None, REPORTED_AFTER_SECONDS


class RetryBudget:
    """Limits how long an operation is retried without progress.

    The n-th wait in a row without progress, counted from 0, is uniform in [0, min(30 s, 0.1 s * 2^n)]. ``max_seconds``
    is measured from the first failure after the last progress. With a ``throttle``, answers with 429 are no failures:
    they have its ``max_seconds``, from the first of them after the last progress.
    """

    def __init__(
        self,
        what: str,
        *,
        max_seconds: float,
        clock: Clock,
        cancelled: threading.Event,
        jitter: random.Random | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._what = what
        self._clock = clock
        self._cancelled = cancelled
        self._jitter = jitter or random.Random()  # noqa: S311  # spreads retries, guards nothing
        self._throttle = throttle
        self._failing = _Standstill(max_seconds, "made no progress", "max_retry_seconds")
        most = 0.0 if throttle is None else throttle.max_seconds
        self._throttled = _Standstill(most, "been throttled by the server", "max_throttled_seconds")

    def progressed(self) -> None:
        self._failing.end()
        self._throttled.end()

    def wait(self, reason: str, hint: str = "") -> None:
        """Wait before the next try. ``reason`` is the last failure, for warnings and the error; ``hint`` is added to
        the error's remedy.

        Raises ElasticsearchUnavailableError when ``max_seconds`` are over, IndexingCancelledError when cancelled.
        """
        self._wait_in(self._failing, reason, hint)

    def wait_throttled(self, reason: str, hint: str = "", *, at_least: float | None = None) -> None:
        """Wait before the next try of a request that was answered with 429. ``at_least``: how long, in seconds, if the
        server has said it; then the other requests of the throttle wait too. Otherwise as `wait`."""
        if self._throttle is None:
            self._wait_in(self._failing, reason, hint, at_least or 0.0)
            return
        # The server is there.
        self._failing.end()
        if at_least:
            self._throttle.pause(at_least)
        with self._throttle.waited.counted():
            self._wait_in(self._throttled, reason, hint, at_least or 0.0)

    def _wait_in(self, standstill: _Standstill, reason: str, hint: str, at_least: float = 0.0) -> None:
        now = self._clock.monotonic()
        if standstill.since is None:
            standstill.since = now
        lasts = now - standstill.since
        left = standstill.max_seconds - lasts
        if left <= 0:
            raise self._over(standstill, reason, hint)
        ceiling = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(standstill.waits, 20))
        standstill.waits += 1
        delay = min(max(self._jitter.uniform(0, ceiling), at_least), left)
        # Within the wait where it is due: one wait can last until the end.
        before_report = max(0.0, standstill.report_at - lasts)
        if before_report < delay:
            self._wait(before_report)
            self._report(standstill, lasts + before_report, left - before_report, reason)
            delay -= before_report
        self._wait(delay)

    def _over(self, standstill: _Standstill, reason: str, hint: str) -> ElasticsearchUnavailableError:
        if not standstill.max_seconds:
            return ElasticsearchUnavailableError(
                f"{self._what} failed: {reason}.", remedy="Check the cluster, and try again."
            )
        return ElasticsearchUnavailableError(
            f"{self._what} has {standstill.state} for {standstill.max_seconds:g} s ({standstill.waits + 1} tries); "
            f"the last answer: {reason}",
            remedy="Nothing was dropped. Check the cluster. The next run of the batch DAG tries the batch again. "
            f"{standstill.setting!r} sets how long to wait.{hint and f' {hint}'}",
        )

    def _wait(self, seconds: float) -> None:
        if self._clock.wait(self._cancelled, seconds):
            raise IndexingCancelledError(f"{self._what} was given up, since another request failed.")

    def _report(self, standstill: _Standstill, seconds: float, left: float, reason: str) -> None:
        """A batch that waits without a message looks as if it hangs."""
        standstill.report_at = seconds + REPORTED_AGAIN_AFTER_SECONDS
        log.warning(
            "%s has %s for %.0f s. Requests go on for another %.0f s: %s",
            self._what, standstill.state, seconds, left, reason,
        )  # fmt: skip


def request_with_retries(
    transport: Transport, retry_budget: RetryBudget, method: str, path: str, body: bytes | None = None
) -> Response:
    """Send an idempotent request until it gets an answer whose status is not in ``RETRIED_STATUSES``.

    Raises the errors of ``RetryBudget.wait``.
    """
    while True:
        try:
            response = transport.request(method, path, body)
        except NoAnswerError as error:
            retry_budget.wait(str(error))
            continue
        if response.status not in RETRIED_STATUSES:
            return response
        kind, text = response.error()
        if is_throttled(response.status, kind):
            retry_budget.wait_throttled(f"{response.status} {kind} {text}", at_least=response.retry_after_seconds)
        else:
            retry_budget.wait(f"{response.status} {kind} {text}")
