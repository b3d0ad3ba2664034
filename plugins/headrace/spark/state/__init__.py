"""Keyed state: a table that each batch updates, versioned by batch time, on the stream's durable storage.

It imports nothing: Spark's Python workers import ``source`` alone, without the ledger.
"""
