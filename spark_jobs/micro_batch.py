"""Runs one batch: with plain Python in the receiver job's application, or with spark-submit in its own application."""

from headrace.spark.batch_command import main
from headrace.spark.termination import run_and_leave

if __name__ == "__main__":
    run_and_leave(main)
