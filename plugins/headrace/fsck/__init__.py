"""Checks a stream's ledger for consistency with itself, the log, the manifests, the checkpoints and Kafka."""
