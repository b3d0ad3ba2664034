"""Keyed state: a table that each batch updates, versioned by batch time, on the stream's durable storage."""

from headrace.spark.state.frames import StateFrames, state_frames
from headrace.spark.state.leaving import leaving_batch_times, leaving_batches
from headrace.spark.state.updating import update_state

__all__ = ["StateFrames", "leaving_batch_times", "leaving_batches", "state_frames", "update_state"]
