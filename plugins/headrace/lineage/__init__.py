"""Lineage of batches for OpenLineage: which offsets of which topics went into which indices, topics and files."""
