"""A batch without Spark: it takes the attempt that it is given, and ends as TOY_BATCH says.

ok completes it, fail reports an error, silent exits well without completing, hang waits for SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from headrace.ledger import Ledger
from headrace.ledger.rows import Attempt

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", required=True)
parser.add_argument("--stream", required=True)
parser.add_argument("--batch-time", type=int, required=True)
parser.add_argument("--attempt", type=int, required=True)
parser.add_argument("--way", required=True)
arguments = parser.parse_args()
behaviour = os.environ.get("TOY_BATCH", "ok")

with Ledger.open(arguments.ledger) as ledger:
    row = next(
        row
        for row in ledger.batches.attempts(arguments.stream, arguments.batch_time)
        if row.number == arguments.attempt
    )
    attempt = Attempt(
        row.stream, row.batch_time_ms, row.number, row.holder, row.way, row.outputs, row.lease_ms, row.lease_until_ms
    )
    print(f"toy batch by way {arguments.way}, attempt {attempt.number}", flush=True)
    if behaviour == "fail":
        ledger.batches.fail_attempt(attempt, "the transform said no")
        sys.exit(1)
    if behaviour == "hang":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(60)
    if behaviour == "ok":
        for output in attempt.outputs:
            ledger.batches.record_output(attempt, output, {"indexed": 1})
        ledger.batches.complete_attempt(attempt)
