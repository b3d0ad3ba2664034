"""The names, types, labels and help of all metrics."""

from __future__ import annotations

from tests.unit.pins.freezing import frozen

from headrace.views.metrics import METRICS


def test_metrics() -> None:
    lines = (f"{metric.kind} {metric.name} {{{', '.join(metric.labels)}}} {metric.help}\n" for metric in METRICS)
    frozen("metrics.txt", "".join(sorted(lines)))
