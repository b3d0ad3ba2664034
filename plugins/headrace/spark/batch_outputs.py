"""`headrace.spark.outputs.registry.needs_empty_batches`, where the batch's operator looks for it."""

from headrace.spark.outputs.registry import needs_empty_batches

__all__ = ["needs_empty_batches"]
