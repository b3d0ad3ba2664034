"""Checks what the ledger says of a stream, with itself, and with the log, the manifests, the checkpoints and Kafka."""
