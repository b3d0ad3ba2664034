"""What a DAG run asks of its stream and its batch: request, steps to run, readiness, receiver job, processes."""
