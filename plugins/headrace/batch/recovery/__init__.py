"""Recovery: rebuild a lost ledger from log, manifests, checkpoints and history, or lost checkpoints from the ledger.

`contents` reads the files. `accepted_blocks`, `found_batches`, `holes` and `found_stream` derive the ledger's state.
`recover` writes it.
"""
