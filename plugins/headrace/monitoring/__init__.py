"""The read side: a stream's state, its numbers over time, and its batches, from the ledger. Imports no Airflow."""
