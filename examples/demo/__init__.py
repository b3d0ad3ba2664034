"""The demo: flights from a real Kafka into a real Elasticsearch, run by a real Airflow, and proved from outside.

Nothing here is used by a stream, and nothing here does for a stream what its own parts do not do: the demo starts the
embedded stack, produces, presses the buttons that a person would press, looks, and counts.
"""
