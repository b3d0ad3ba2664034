"""Collects samples into the metric families of the Prometheus client, by the catalogue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from headrace.metrics.catalogue import METRICS, Kind

_KINDS: Mapping[Kind, Any] = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class Families:
    """The families of one scrape. Labels are given as text or numbers, in the order of the catalogue."""

    def __init__(self) -> None:
        self._families = {
            metric.name: _KINDS[metric.kind](metric.name, metric.help, labels=metric.labels) for metric in METRICS
        }

    def add(self, name: str, labels: Sequence[object], value: float | None) -> None:
        """Add a sample of a gauge or counter; nothing if its value is not known."""
        if value is not None:
            self._families[name].add_metric([str(label) for label in labels], float(value))

    def add_histogram(
        self, name: str, labels: Sequence[object], totals: Mapping[str, float], total: str, bounds: Sequence[float]
    ) -> None:
        """Add the histogram that `headrace.ledger.events.observation` has made under the name ``total``."""
        buckets, so_far = [], 0.0
        for bound in (*bounds, math.inf):
            so_far += totals.get(f"{total}_le_{bound:g}", 0.0)
            buckets.append(("+Inf" if bound == math.inf else str(bound), so_far))
        self._families[name].add_metric([str(label) for label in labels], buckets, totals.get(f"{total}_sum", 0.0))

    def collect(self) -> Iterator[Family]:
        """Yield the families that have samples."""
        for family in self._families.values():
            if family.samples:
                yield family
