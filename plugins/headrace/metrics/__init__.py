"""The metrics of all streams for Prometheus, read from the ledger."""
