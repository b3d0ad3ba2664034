"""A batch without Spark: it takes the attempt that it is given, and ends as TOY_BATCH says.

ok completes it, fail reports an error, code and final report one of that kind, fail:OUTPUT does so when it comes to
that output, silent exits well without completing, die dies after the last record, hang waits for SIGTERM, warn
completes it with a warning, late completes it and ends with an error.

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

from headrace.ledger import Ledger
from headrace.spark.transforms import tried_with
from headrace.stream import Stream


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
    with Ledger.open(given.ledger) as ledger:
        rows = ledger.attempts.of_batch(given.stream, given.batch_time)
        row = next(row for row in rows if row.number == given.attempt)
        attempt, parameters = row.claim(), row.attributes.get("parameters")
        print(f"toy batch by way {given.way}, attempt {attempt.number}, parameters {parameters}", flush=True)
        if behaviour in ("code", "final"):
            stream = Stream.from_json(ledger.streams.get(given.stream).definition)
            reported = {"failure": behaviour, "tried_with": tried_with(stream, attempt.outputs)}
            ledger.attempts.renew(attempt, attributes=reported)
        if behaviour in ("fail", "code", "final"):
            ledger.attempts.fail(attempt, "the transform said no")
            sys.exit(1)
        if behaviour == "hang":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            time.sleep(60)
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

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


if __name__ == "__main__":
    run(sys.argv[1:], os.environ)
