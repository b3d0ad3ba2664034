"""Scrapes a ledger and reads the exposition with the Prometheus client's parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.ledger import Ledger
from headrace.views.metrics import render

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(ledger: Ledger) -> dict[Sample, float]:
    """Return the value of each sample, by its name and labels. A sample that appears twice is an error."""
    body, _ = render([ledger.url], read=lambda _: ledger.overviews.numbers())
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    """Return the sample with this name, and these labels among others."""
    (found,) = (number for (each, given), number in samples.items() if each == name and labels.items() <= set(given))
    return found


def counters(samples: dict[Sample, float]) -> dict[Sample, float]:
    """Return the samples that may only grow."""
    return {key: each for key, each in samples.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}
