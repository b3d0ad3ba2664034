"""How long GET /headrace/api/v1/streams takes: 20 streams with 10,000 batches each in one SQLite ledger.

    python -m benchmarks.api_streams [--streams 20] [--batches 10000] [--ledger FILE]

The request goes through the whole application, but for Airflow and the network. Prints milliseconds of the first
request, and the median and the longest of the next twenty. The processor time does not depend on what else the machine
does. Filling the ledger takes a minute or two; ``--ledger`` keeps it for the next time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

from fastapi.testclient import TestClient
from sqlalchemy import event
from tests.page_server import application

from headrace.ledger import Ledger
from headrace.testing.seeded_ledger import seed

_REQUESTS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--batches", type=int, default=10_000, help="of each stream")
    parser.add_argument("--ledger", type=Path, help="a file; it is filled if it does not exist")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        path = (given.ledger or Path(folder) / "ledger.db").absolute()
        is_new = not path.exists()
        with Ledger.open(f"sqlite:///{path}") as ledger:
            if is_new:
                seed(ledger, streams=given.streams, batches=given.batches)
            _measure(ledger)


def _measure(ledger: Ledger) -> None:
    client = TestClient(application(ledger.url))
    statements: list[str] = []
    event.listen(
        ledger.streams._database.engine, "before_cursor_execute", lambda _c, _u, text, *_: statements.append(text)
    )
    times, processor = [], []
    for _ in range(_REQUESTS + 1):
        statements.clear()
        began, worked = time.monotonic(), time.process_time()
        answer = client.get("/headrace/api/v1/streams")
        times.append((time.monotonic() - began) * 1000)
        processor.append((time.process_time() - worked) * 1000)
    first, *others = times
    print(
        f"{len(answer.json()['streams'])} streams: first {first:.0f} ms, median {statistics.median(others):.0f} ms, "
        f"longest {max(others):.0f} ms; processor time: median {statistics.median(processor[1:]):.0f} ms, longest "
        f"{max(processor[1:]):.0f} ms; {len(statements)} statements, {len(answer.content):,} bytes"
    )


if __name__ == "__main__":
    main()
