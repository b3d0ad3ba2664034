"""The demo: flights from a real Kafka into a real Elasticsearch, run by a real Airflow, and proved from outside.

No stream uses this code, and it does no part of a stream's work. The demo starts the embedded stack, produces records,
unpauses the DAGs as a person would, watches, and counts.
"""
