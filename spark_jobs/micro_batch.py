"""Runs one batch: plain Python for a batch in the receiver job's application, under spark-submit for one of its own."""

from headrace.spark.micro_batch_job import main
from headrace.spark.termination import run_and_leave

if __name__ == "__main__":
    run_and_leave(main)
