"""Retries of requests to Elasticsearch: exponential backoff with full jitter, for a bounded time."""

from __future__ import annotations

import logging
import random
import threading

from headrace.clock import Clock
from headrace.elasticsearch.errors import ElasticsearchUnavailableError, IndexingCancelledError
from headrace.elasticsearch.transport import NoAnswerError, Response, Transport

log = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 30.0

REPORTED_AFTER_SECONDS = 2.0
REPORTED_AGAIN_AFTER_SECONDS = 30.0

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class RetryBudget:
    """Limits how long an operation is retried without progress.

    The n-th wait in a row without progress, counted from 0, is uniform in [0, min(30 s, 0.1 s * 2^n)]. ``max_seconds``
    is measured from the first failure after the last progress.
    """

    def __init__(
        self,
        what: str,
        *,
        max_seconds: float,
        clock: Clock,
        cancelled: threading.Event,
        jitter: random.Random | None = None,
    ) -> None:
        self._what = what
        self._max_seconds = max_seconds
        self._clock = clock
        self._cancelled = cancelled
        self._jitter = jitter or random.Random()  # noqa: S311  # spreads retries, guards nothing
        self._failures = 0
        self._failing_since: float | None = None
        self._report_at = REPORTED_AFTER_SECONDS

    def progressed(self) -> None:
        self._failures = 0
        self._failing_since = None
        self._report_at = REPORTED_AFTER_SECONDS

    def wait(self, reason: str, hint: str = "") -> None:
        """Wait before the next try. ``reason`` is the last failure, for warnings and the error; ``hint`` is added to
        the error's remedy.

        Raises ElasticsearchUnavailableError when ``max_seconds`` are over, IndexingCancelledError when cancelled.
        """
        now = self._clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        left = self._max_seconds - (now - self._failing_since)
        if left <= 0:
            if not self._max_seconds:
                raise ElasticsearchUnavailableError(
                    f"{self._what} failed: {reason}.", remedy="Check the cluster, and try again."
                )
            raise ElasticsearchUnavailableError(
                f"{self._what} made no progress for {self._max_seconds:g} s ({self._failures + 1} tries); "
                f"the last answer: {reason}",
                remedy="Nothing was dropped. Check the cluster. The next run of the batch DAG tries the batch again. "
                f"'max_retry_seconds' sets how long to wait.{hint and f' {hint}'}",
            )
        failing = now - self._failing_since
        ceiling = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(self._failures, 20))
        self._failures += 1
        delay = min(self._jitter.uniform(0, ceiling), left)
        # Within the wait where it is due: one wait can last until the end.
        before_report = max(0.0, self._report_at - failing)
        if before_report < delay:
            self._wait(before_report)
            self._report(failing + before_report, left - before_report, reason)
            delay -= before_report
        self._wait(delay)

    def _wait(self, seconds: float) -> None:
        if self._clock.wait(self._cancelled, seconds):
            raise IndexingCancelledError(f"{self._what} was given up, since another request failed.")

    def _report(self, failing_seconds: float, left: float, reason: str) -> None:
        """A batch that waits without a message looks as if it hangs."""
        self._report_at = failing_seconds + REPORTED_AGAIN_AFTER_SECONDS
        log.warning(
            "%s has made no progress for %.0f s. Requests go on for another %.0f s: %s",
            self._what, failing_seconds, left, reason,
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
        retry_budget.wait(f"{response.status} {' '.join(response.error())}")
