"""Checks whether a stream can run: its connections, its rights in Kafka, and the places of its tasks."""
