"""Runs the receiver job: under spark-submit, or with plain Python, which starts Spark's JVM itself."""

from headrace.spark.receiving.receiver_process import main
from headrace.spark.termination import run_and_leave

if __name__ == "__main__":
    run_and_leave(main)
