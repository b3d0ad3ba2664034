"""The catalogue, its documentation, and the conventions of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.unit.views.metrics.scraping import scrape

from headrace.views.metrics import METRICS, Kind, Metric

ROOT = Path(__file__).parents[4]
LABELS = {"ledger", "stream", "input", "receiver", "topic", "partition", "output", "listener", "state", "result"}


def row(metric: Metric) -> str:
    """The metric's line in docs/metrics.md."""
    return f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"


def test_the_documentation_lists_every_metric() -> None:
    documented = re.findall(r"^\| `headrace_\w+` \|.*$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert documented == [row(metric) for metric in METRICS]


def test_names_and_labels_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"headrace_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert set(metric.labels) <= LABELS, metric.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)(_|$)", metric.name), metric.name


def test_a_stream_at_work_has_every_metric(world: Any) -> None:
    """So none of the catalogue is an empty promise."""
    attempts = world.ledger.attempts
    world.ledger.streams.register(
        "flights",
        '{"outputs": [{"id": "index"}], "limits": {"max_log_bytes": 1000}}',
        batch_interval_ms=1_000,
        block_interval_ms=200,
    )
    world.add({0: (0, 10)})
    world.clock.advance(1500)
    world.allocate(1_700_000_001_000)
    attempt = attempts.begin("flights", 1_700_000_001_000, holder="task", way="connect", lease_ms=5_000)
    attempts.record_output(attempt, "index", {"created": 9, "dead_lettered": 1, "requests": 1, "bytes": 5})
    attempts.complete(attempt)
    stats = {
        "connected": True,
        "queued_blocks": 1,
        "queued_bytes": 10,
        "disk": [100, 200],
        "total_lag": 5,
        "lag": {"departures": {"0": [5, 1.5]}},
        "lag_seconds": 1.5,
        "lag_unknown": 0,
    }
    world.ledger.jobs.renew(world.job, attributes={"listeners": {"webhook": {"dropped": 0, "missed": 0, "failed": 0}}})
    world.ledger.receivers.set_rate(world.job, {world.receiver.receiver_id: 100.0})
    world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=0, stats=stats)
    found = {name for name, _ in scrape(world.ledger)}
    missing = {metric.name for metric in METRICS if not found.issuperset(metric.samples)}
    assert missing == set()
