from __future__ import annotations

from headrace.blocks import ReceiverId
from headrace.hooks.receiver_job import JobWatch
from headrace.ledger import Ledger


def test_troubles_of_the_job_are_told_when_they_begin_and_end(tmp_path) -> None:
    told: list[str] = []
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        lease = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        watch = JobWatch("shop", lease.epoch, tell=told.append)
        for troubles in ([], ["no topic cliks"], ["no topic cliks"], [], []):
            ledger.jobs.renew(lease, attributes={"troubles": troubles})
            assert watch.look(ledger) is None
    assert told[1:] == ["Trouble: no topic cliks", "The trouble is over."]


def test_a_pause_of_a_receiver_is_told(tmp_path) -> None:
    told: list[str] = []
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        job = ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        lease = ledger.receivers.register(job, ReceiverId("shop", "records", 0), host="h", lease_ms=60_000)
        watch = JobWatch("shop", job.epoch, tell=told.append)
        for reason in (None, "the disk is full", None):
            ledger.receivers.heartbeat(lease, sealed_through_ms=0, paused_reason=reason)
            watch.look(ledger)
    running = "Receiver shop/records/0 is running on h"
    assert told[1:] == [running, f"{running}, paused: the disk is full", running]
