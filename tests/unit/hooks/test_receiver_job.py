from __future__ import annotations

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
