"""A batch without Spark: it takes the attempt that it is given, and ends as TOY_BATCH says.

ok completes it, fail reports an error, code and final report one of that kind, fail:OUTPUT does so when it comes to
that output, silent exits well without completing, die dies after the last record, hang waits for SIGTERM, warn
completes it with a warning, late completes it and ends with an error. Of a range each batch ends so; fail@TIME fails
the one of this time, and killed@TIME dies at it without a report.

It is a process of its own, or runs in the test's: importing the ledger takes a hundred times as long as the batch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from headrace.batch.time_range import TimeRange
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.spark.records.transforms import tried_with
from headrace.stream import Stream
from headrace.stream_context import StreamContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.ledger.batches.tables import Attempt, AttemptRow
    from headrace.spark.attempts.batch_attempt import BatchAttempt


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the batch. Raises SystemExit unless it ends well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--batch-time", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--way", required=True)
    given = parser.parse_args(arguments)
    behaviour = environment.get("TOY_BATCH", "ok")
    if behaviour == "hang":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(60)
    if _is_range(given):
        _run_range(given, behaviour)
    else:
        _run_attempt(given, behaviour)


def _run_attempt(given: argparse.Namespace, behaviour: str) -> None:
    with Ledger.open(given.ledger) as ledger:
        row = _first(given, ledger)
        attempt, parameters = row.claim(), row.attributes.get("parameters")
        print(f"toy batch by way {given.way}, attempt {attempt.number}, parameters {parameters}", flush=True)
        if behaviour in ("code", "final"):
            stream = Stream.from_json(ledger.streams.get(given.stream).definition)
            reported = {"failure": behaviour, "tried_with": tried_with(stream, attempt.outputs)}
            ledger.attempts.renew(attempt, attributes=reported)
        if behaviour in ("fail", "code", "final"):
            ledger.attempts.fail(attempt, "the transform said no")
            sys.exit(1)
        if behaviour == "warn":
            print("headrace: flights, batch of now: warning: output elasticsearch: 429", flush=True)
        if behaviour in ("ok", "die", "warn", "late") or behaviour.startswith("fail:"):
            for output in attempt.outputs:
                if behaviour == f"fail:{output}":
                    ledger.attempts.fail(attempt, f"{output} said no")
                    sys.exit(1)
                ledger.attempts.record_output(attempt, output, {"indexed": 1})
            if behaviour == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            ledger.attempts.complete(attempt)
            if behaviour == "late":
                sys.exit("the session did not close")


def _first(given: argparse.Namespace, ledger: Ledger) -> AttemptRow:
    rows = ledger.attempts.of_batch(given.stream, given.batch_time)
    return next(row for row in rows if row.number == given.attempt)


def _is_range(given: argparse.Namespace) -> bool:
    with Ledger.open(given.ledger) as ledger:
        return TimeRange.of(_first(given, ledger).attributes) is not None


class _NoSessions:
    jobs = None

    def attributes(self, number: int) -> dict[str, object]:
        return {}

    def end_earlier(self, claim: Attempt) -> None:
        pass

    def open(self, number: int) -> SparkSession:
        raise AssertionError("a toy needs no session")

    def give_up(self, number: int) -> None:
        pass


def _run_range(given: argparse.Namespace, behaviour: str) -> None:
    """Run the range as the real command does, with toys of attempts."""
    from headrace.spark.attempts.batch_command import definition_of
    from headrace.spark.attempts.range_run import RangeRunner, RangeSettings

    how, _, at = behaviour.partition("@")

    def toy(attempt: BatchAttempt) -> SimpleNamespace:
        claim = attempt.claim
        if how == "killed" and claim.batch_time_ms == int(at):
            sys.exit(1)
        if how == "fail" and at in ("", str(claim.batch_time_ms)):
            attempt.ledger.attempts.fail(claim, "the transform said no")
            raise HeadraceError("the transform said no")
        for output in claim.outputs:
            attempt.ledger.attempts.record_output(claim, output, {"indexed": 1})
        attempt.ledger.attempts.complete(claim)
        return SimpleNamespace(records=1)

    with Ledger.open(given.ledger) as ledger, patch("headrace.spark.attempts.range_run.run_attempt", toy):
        first = _first(given, ledger)
        batches = TimeRange.of(first.attributes)
        assert batches is not None
        settings = RangeSettings(
            threads=1, partitions=None, parameters={}, out=sys.stdout, report=print, lease_ms=30_000
        )
        context = StreamContext(definition_of(first.claim(), ledger), ledger)
        try:
            RangeRunner(context, batches, first, _NoSessions(), settings).run()
        except HeadraceError as error:
            print(error)
            sys.exit(1)


class InThisProcess:
    """As much of `subprocess.Popen` as a task uses. The batch has ended when the constructor returns."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_options: object) -> None:
        assert env.get("TOY_BATCH", "ok") not in ("hang", "die"), "that takes a process of its own"
        self.stdout, self.returncode = StringIO(), 0
        with redirect_stdout(self.stdout):
            try:
                run(command[2:], env)
            except SystemExit as ended:
                self.returncode = ended.code if isinstance(ended.code, int) else 1
        self.stdout.seek(0)

    def poll(self) -> int:
        return self.returncode

    wait = poll


if __name__ == "__main__":
    run(sys.argv[1:], os.environ)
