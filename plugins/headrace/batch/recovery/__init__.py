"""Recovery: rebuild a lost ledger from log, manifests, checkpoints and history, or lost checkpoints from the ledger.

`folder_contents` and `found_manifests` read the files. `accepted_blocks`, `rebuilt_batches`, `unaccounted_offsets` and
`rebuilt_stream` derive the ledger's state. `recover` writes it.
"""
