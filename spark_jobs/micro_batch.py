"""Runs one batch: plain Python for a batch in the receiver job's application, under spark-submit for one of its own."""

import sys

from headrace.spark.micro_batch_job import main

if __name__ == "__main__":
    sys.exit(main())
