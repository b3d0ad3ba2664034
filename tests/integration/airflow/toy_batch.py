"""A batch without Spark: completes the attempt that it is given.

As long as the file FAIL_IF is there it fails: at the outputs that the file names, or at all if it is empty. As long as
there is a file "hold" beside it, it goes on and on, which it tells by a file "held.BATCH TIME.ATTEMPT.PID".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from headrace.ledger import Ledger

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", required=True)
parser.add_argument("--stream", required=True)
parser.add_argument("--batch-time", type=int, required=True)
parser.add_argument("--attempt", type=int, required=True)
parser.add_argument("--way", required=True)
arguments = parser.parse_args()
fail_if = Path(os.environ["FAIL_IF"])

with Ledger.open(arguments.ledger) as ledger:
    rows = ledger.attempts.of_batch(arguments.stream, arguments.batch_time)
    row = next(row for row in rows if row.number == arguments.attempt)
    attempt = row.claim()
    print(f"toy batch, attempt {attempt.number}", flush=True)
    hold = fail_if.with_name("hold")
    if hold.exists():
        hold.with_name(f"held.{attempt.batch_time_ms}.{attempt.number}.{os.getpid()}").touch()
    while hold.exists():
        ledger.attempts.renew(attempt)
        time.sleep(0.1)
    failing = (fail_if.read_text().split() or attempt.outputs) if fail_if.exists() else ()
    for output in attempt.outputs:
        if output in failing:
            sys.exit("the transform said no")
        ledger.attempts.record_output(attempt, output, {"indexed": 1, "parameters": row.attributes.get("parameters")})
    ledger.attempts.complete(attempt)
