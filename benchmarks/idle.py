"""What a receiver job costs while no record comes: the processor time of its driver, its JVM and its receiver.

    python -m benchmarks.idle --seconds 60 --rounds 3 [--json]

Starts an embedded Kafka and a receiver job of one stream, and waits for it to settle. Airflow is not part of it.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.structured_streaming import cpu_seconds
from benchmarks.warm_batch import receiving

# Spark ends the Python workers that the job has warmed up after a minute without work.
SETTLING_SECONDS = 90.0
MOST = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shares = []
    with bench_folder() as folder, receiving(folder, records=1_000) as (_, _, job):
        time.sleep(SETTLING_SECONDS)
        for _ in range(options.rounds):
            used, began = cpu_seconds(job), time.monotonic()
            time.sleep(options.seconds)
            shares.append((cpu_seconds(job) - used) / (time.monotonic() - began))
    limits = tuple(MOST for _ in shares)
    print_measures(
        [Measure("one idle stream", "of a core", tuple(shares), f"{MOST:.0%}", limits)], as_json=options.json
    )


if __name__ == "__main__":
    main()
