"""What a DAG run needs from its stream and its batch: request, steps to run, readiness, receiver job, processes."""
