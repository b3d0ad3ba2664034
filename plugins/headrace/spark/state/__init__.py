"""Keyed state: a table that each batch updates, versioned by batch time, on the stream's durable storage."""

from headrace.spark.state.frames import StateFrames, state_frames
from headrace.spark.state.updating import leaving_batch_times, update_state

__all__ = ["StateFrames", "leaving_batch_times", "state_frames", "update_state"]
