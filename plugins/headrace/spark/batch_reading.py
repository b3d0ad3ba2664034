"""Caches what an attempt reads: each set of batches becomes DataFrames once, for all outputs that read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headrace.spark.batch_inputs import load_manifests, read_inputs
from headrace.spark.incarnations import BatchIncarnations

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.ledger.models import BatchOrigin
    from headrace.spark.decoding import DecodedInput
    from headrace.stream import Stream


class BatchReading:
    """The inputs of one attempt. ``session`` is called when Spark is first needed."""

    def __init__(self, stream: Stream, session: Callable[[], SparkSession], partitions: int | None) -> None:
        self._stream = stream
        self._session = session
        self._partitions = partitions
        self._spark: SparkSession | None = None
        self._inputs: dict[tuple[BatchOrigin, ...], dict[str, DecodedInput]] = {}
        self._incarnations: dict[tuple[BatchOrigin, ...], BatchIncarnations] = {}
        self._undecodable: dict[tuple[BatchOrigin, ...], tuple[int, dict[str, DataFrame]]] = {}

    @property
    def spark(self) -> SparkSession:
        """The session, opened at the first use."""
        if self._spark is None:
            self._spark = self._session()
        return self._spark

    def inputs(self, origins: tuple[BatchOrigin, ...]) -> dict[str, DecodedInput]:
        """Every input, by id, with its records of these batches."""
        if origins not in self._inputs:
            self._inputs[origins] = read_inputs(self.spark, self._stream, origins, self._partitions)
        return self._inputs[origins]

    def decoded(self, origins: tuple[BatchOrigin, ...]) -> dict[str, DataFrame]:
        """The inputs with decoded keys and values, as the user's functions get them."""
        return {name: views.decoded for name, views in self.inputs(origins).items()}

    def incarnations(self, origins: tuple[BatchOrigin, ...]) -> BatchIncarnations:
        """The topic incarnations of these batches' records."""
        if origins not in self._incarnations:
            self._incarnations[origins] = BatchIncarnations.of(load_manifests(origins))
        return self._incarnations[origins]

    def undecodable(self, origins: tuple[BatchOrigin, ...]) -> tuple[int, Mapping[str, DataFrame]]:
        """The number of undecodable records of these batches, and these records for each input that has any."""
        if origins not in self._undecodable:
            views = self.inputs(origins)
            found = {name: view.undecodable for name, view in views.items() if view.undecodable is not None}
            counts = {name: rows.count() for name, rows in found.items()}
            kept = {name: rows for name, rows in found.items() if counts[name]}
            self._undecodable[origins] = (sum(counts.values()), kept)
        return self._undecodable[origins]
