"""Recovery: a lost ledger from log, manifests, checkpoints and history; lost checkpoints from the ledger.

`evidence` reads, `accepted_blocks`, `found_batches` and `found_stream` conclude, `recover` acts.
"""
