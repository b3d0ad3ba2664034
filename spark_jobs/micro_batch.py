"""Runs one batch: with plain Python in the receiver job's application, or with spark-submit in its own application."""

import sys

from headrace.spark.attempts.batch_server import run_in_server

if __name__ == "__main__":
    code = run_in_server(sys.argv[1:])
    if code is not None:
        sys.exit(code)

    from headrace.spark.attempts.batch_command import main
    from headrace.spark.termination import run_and_leave

    run_and_leave(main)
