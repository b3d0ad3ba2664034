"""Keyed state: a table that each batch updates, versioned by batch time, on the stream's durable storage."""

from headrace.spark.state.eviction import evicted_batch_times, evicted_batches
from headrace.spark.state.frames import StateFrames, state_frames
from headrace.spark.state.updating import update_state

__all__ = ["StateFrames", "evicted_batch_times", "evicted_batches", "state_frames", "update_state"]
