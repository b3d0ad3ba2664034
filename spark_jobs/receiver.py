"""The receiver job: run it under spark-submit, or by plain Python, which starts Spark's JVM itself."""

import sys

from headrace.spark.receiver_job import main

if __name__ == "__main__":
    sys.exit(main())
