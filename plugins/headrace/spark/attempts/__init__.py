"""Attempts at batches: what is planned, run, shared with other batches, cancelled and reported."""
