"""A receiver job without Kafka and Spark: it holds the lease, beats, and ends as it is told.

Run as ``toy_receiver.py --ledger URL --stream NAME``; TOY says how it behaves: run, crash (before the lease), fail
(with an error in the ledger), vanish (with a live lease that is never renewed), shared (as the process of a shared job,
which adopts what is requested of it).
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from headrace.blocks import ReceiverId
from headrace.ledger import Ledger
from headrace.ledger.errors import LeaseHeldError
from headrace.processes import PROCESS, own_identity

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", required=True)
parser.add_argument("--stream", required=True)
parser.add_argument("--revision", type=int)
parser.add_argument("--holder", required=True)
arguments = parser.parse_args()
behaviour = os.environ.get("TOY", "run")
# A job that runs has to keep its lease on a machine that is busy with other things.
lease_ms = 1_500 if behaviour == "vanish" else 60_000

print("toy receiver job begins", flush=True)
if behaviour == "crash":
    sys.exit("java.lang.IllegalArgumentException: no such master")

if behaviour == "shared":
    with Ledger.open(arguments.ledger) as ledger:
        process = {"pid": os.getpid(), PROCESS: own_identity()}
        ledger.shared_jobs.acquire("shared", holder=arguments.holder, lease_ms=60_000, attributes=process)
        while True:
            for request in ledger.jobs.requests("shared"):
                adopted = ledger.jobs.adopt(request, holder=arguments.holder, lease_ms=60_000, attributes=process)
                ledger.jobs.update(adopted, state="running")
            time.sleep(0.05)

with Ledger.open(arguments.ledger) as ledger:
    try:
        lease = ledger.jobs.acquire(
            arguments.stream,
            holder=arguments.holder,
            lease_ms=lease_ms,
            attributes={"ui_url": "http://127.0.0.1:4040", "pid": os.getpid()},
        )
    except LeaseHeldError as error:
        print(error, flush=True)
        sys.exit(75)
    receiver = ledger.receivers.register(
        ledger.receivers.schedule(lease, ReceiverId(arguments.stream, "records", 0)), host="h", lease_ms=lease_ms
    )
    ledger.jobs.update(lease, state="running")
    print("toy receiver job runs", flush=True)
    if behaviour == "vanish":
        sys.exit(137)
    if behaviour == "fail":
        ledger.jobs.release(lease, "failed", "Kafka said no")
        sys.exit("KafkaException: Kafka said no")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ledger.receivers.heartbeat(receiver, sealed_through_ms=ledger.now_ms())
        if ledger.jobs.renew(lease).stop_requested:
            ledger.receivers.release(receiver)
            ledger.jobs.release(lease)
            break
        time.sleep(0.05)
