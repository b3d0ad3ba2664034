"""A batch without Spark: completes the attempt that it is given; fails as long as the file FAIL_IF says so."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from headrace.ledger import Ledger
from headrace.ledger.rows import Attempt

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", required=True)
parser.add_argument("--stream", required=True)
parser.add_argument("--batch-time", type=int, required=True)
parser.add_argument("--attempt", type=int, required=True)
parser.add_argument("--way", required=True)
arguments = parser.parse_args()

with Ledger.open(arguments.ledger) as ledger:
    (row,) = [
        row
        for row in ledger.batches.attempts(arguments.stream, arguments.batch_time)
        if row.number == arguments.attempt
    ]
    attempt = Attempt(
        row.stream, row.batch_time_ms, row.number, row.holder, row.way, row.outputs, row.lease_ms, row.lease_until_ms
    )
    if Path(os.environ["FAIL_IF"]).exists():
        sys.exit("the transform said no")
    print(f"toy batch, attempt {attempt.number}", flush=True)
    for output in attempt.outputs:
        ledger.batches.record_output(attempt, output, {"indexed": 1})
    ledger.batches.complete_attempt(attempt)
