"""The tracker's setting: a topic of four partitions, and two receivers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.receiver.tracking.setting import MakeStream, Setting

from headrace.ledger import Ledger
from headrace.ledger.tables import JobLease
from headrace.stream import Stream
from headrace.testing.fake_kafka import FakeKafka

OpenLedger = Callable[[Stream], tuple[Ledger, JobLease]]


@pytest.fixture
def setting(make_stream: MakeStream, open_ledger: OpenLedger, fake_kafka: FakeKafka) -> Any:
    stream = make_stream(receivers=2)
    fake_kafka.create("flights", 4)
    made = Setting(stream, *open_ledger(stream), fake_kafka)
    yield made
    if made.thread.is_alive():
        made.end()
