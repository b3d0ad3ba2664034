"""How soon receivers store blocks again after a fault of a link to Kafka or to the ledger, and while a leader hangs.

    python -m benchmarks.link_faults [--case leader --case kafka-cut] [--seconds 60] [--rounds 3] [--json]

Starts Kafka, Postgres and three streams, whose receivers are processes without Spark and Airflow. Each stream gets 100
records a second. What they do goes through the hammer's links; the load does not. ``--seconds`` is the fault's length
in place of each case's own. The time of a case runs from the end of the fault until each stream has stored all that
Kafka had then, and is that of the slowest stream. With ``-at-start`` the fault begins before the receiver jobs do. With
``-silent`` connections that lost data stay silent after the fault, as behind a firewall that has forgotten them;
otherwise they are reset.

In the case ``leader`` the first topic's leader, one of three brokers, is stopped with SIGSTOP and continued later. Its
figures are the longest pauses of any partition: between two stored blocks, and between two records that Kafka
acknowledged to the load, since there is nothing to store in the latter.

A time or a pause of receivers above 20 s ends the run with exit code 1. All cases take about 20 minutes.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.warm_batch import until
from confluent_kafka import Producer
from examples.demo.producing import create_topic
from tests.hammer.brokers import further_brokers, launch_further, name_of_leader
from tests.hammer.kinds import Action
from tests.hammer.link import Link
from tests.hammer.network import put_link_before
from tests.integration.receiver.launchers import ProcessLauncher

from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.server import LOOPBACK
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.tables import Declared
from headrace.receiver.tracker import ReceiverTracker
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

MAX_SECONDS = 20.0
STREAMS = 3
PARTITIONS = 2
RECORDS_PER_SECOND = 100.0
_LEASE_MS = 30_000
_FOUND_SECONDS = 120.0
_STEADY_SECONDS = 8.0
_AFTER_HANG_SECONDS = 20.0
_POLL_SECONDS = 0.1

Partition = tuple[str, int]
Steps = dict[Partition, list[tuple[float, int]]]
"""When which offset was reached, of each partition."""


@dataclass(frozen=True)
class Case:
    """A fault of the links to ``part``: Kafka or the ledger."""

    part: str
    action: Action
    seconds: float
    at_start: bool = False
    silent: bool = False


LEADER = "leader"
CASES = {
    "kafka-cut": Case("kafka", Action.CUT, 20),
    "kafka-cut-at-start": Case("kafka", Action.CUT, 40, at_start=True),
    "kafka-blackhole": Case("kafka", Action.BLACKHOLE, 60),
    "kafka-blackhole-silent": Case("kafka", Action.BLACKHOLE, 60, silent=True),
    "kafka-blackhole-at-start": Case("kafka", Action.BLACKHOLE, 40, at_start=True),
    "kafka-blackhole-at-start-silent": Case("kafka", Action.BLACKHOLE, 40, at_start=True, silent=True),
    "ledger-flap": Case("ledger", Action.FLAP, 60),
    "ledger-flap-at-start": Case("ledger", Action.FLAP, 60, at_start=True),
    "ledger-blackhole": Case("ledger", Action.BLACKHOLE, 60),
    "ledger-blackhole-silent": Case("ledger", Action.BLACKHOLE, 60, silent=True),
    LEADER: Case("kafka", Action.HANG, 30),
}


class Load:
    """Produces to each partition of the topics, from a thread; ``acknowledged`` has what Kafka has taken."""

    def __init__(self, bootstrap_servers: str, topics: Sequence[str]) -> None:
        self.acknowledged: Steps = {(topic, number): [] for topic in topics for number in range(PARTITIONS)}
        # A broker that hangs is noticed soon, so that the load does not pause longer than Kafka itself.
        self._producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "acks": "all", "log_level": 0, "socket.timeout.ms": 3_000}
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def newest(self) -> dict[Partition, int]:
        """The offset after the last acknowledged record of each partition."""
        return {partition: max((end for _, end in steps), default=0) for partition, steps in self.acknowledged.items()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PARTITIONS / RECORDS_PER_SECOND):
            for topic, number in self.acknowledged:
                self._producer.produce(topic, b"x" * 200, partition=number, on_delivery=self._delivered)
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            step = (time.monotonic(), message.offset() + 1)
            self.acknowledged[message.topic(), message.partition()].append(step)


class Job:
    """A stream's receiver job, in a thread. It waits for a ledger that is away, as a real one does."""

    def __init__(self, number: int, folder: Path, bootstrap_servers: str, ledger: str) -> None:
        self.topic = f"topic-{number}"
        source = KafkaInput(bootstrap_servers=bootstrap_servers, topics=(self.topic,), group=self.topic, receivers=1)
        self.stream = Stream(
            name=f"stream-{number}",
            inputs=(source,),
            outputs=(ConsoleOutput(id="console"),),
            batch_interval="10 s",
            block_interval="200 ms",
            storage=str(folder / "storage"),
            ledger=ledger,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """A job that has ended would first have to start Spark again, so its time would be wrong."""
        assert self._thread.is_alive(), f"the receiver job of {self.stream.name} has ended"

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with Ledger.open(self.stream.ledger, create=False) as ledger:
                    lease = ledger.jobs.acquire(self.stream.name, holder=uuid.uuid4().hex, lease_ms=_LEASE_MS)
                    report = ReceiverTracker(StreamContext(self.stream, ledger), ProcessLauncher(), lease).run(
                        self._stop
                    )
                    print(f"{self.stream.name}: {report}", file=sys.stderr)
                return
            except LedgerUnavailableError:
                self._stop.wait(1.0)


@dataclass(frozen=True)
class Ground:
    """The servers that run, their links, and the streams, whose jobs have not started."""

    brokers: list[KafkaServer]
    links: dict[str, list[Link]]
    jobs: list[Job]
    ledger: Ledger
    load: Load

    def stored(self) -> dict[Partition, int]:
        """The offset up to which each partition's records are in blocks. Asked past the link."""
        rows = [row for job in self.jobs for row in self.ledger.positions.all(job.stream.name)]
        return {(row.partition.topic, row.partition.partition): row.next_offset for row in rows}

    def until_stored(self, what: str, seconds: float) -> float:
        """How long it takes until all is stored that Kafka has now."""
        began, needed = time.monotonic(), self.load.newest()

        def all_stored() -> bool:
            for job in self.jobs:
                job.check()
            stored = self.stored()
            return all(stored.get(partition, 0) >= end for partition, end in needed.items())

        until(what, all_stored, seconds)
        return time.monotonic() - began


@contextmanager
def ground(folder: Path, brokers: int, *, silent: bool) -> Iterator[Ground]:
    """Start the servers and the load; stop everything afterwards."""
    first = KafkaServer(folder / "kafka", heap="400m")
    servers: list[KafkaServer] = [first, *(further_brokers(first, folder, brokers) if brokers > 1 else ())]
    kafka_links = [put_link_before(server, silent=silent) for server in servers]
    postgres = PostgresServer(folder / "postgres")
    ledger_link = Link(postgres.port, silent=silent)
    with ExitStack() as stack:
        for link in (*kafka_links, ledger_link):
            stack.enter_context(link)
        for server in servers:
            stack.callback(server.stop)
        launch_further(servers)
        first.start()
        for server in servers[1:]:
            server.await_ready()
        stack.callback(postgres.wipe)
        stack.enter_context(postgres)
        postgres.create_database("ledger")
        url = postgres.url("ledger")
        ledger = stack.enter_context(Ledger.open(url))
        linked_url = url.replace(f":{postgres.port}/", f":{ledger_link.port}/")
        linked = ",".join(f"{LOOPBACK}:{link.port}" for link in kafka_links)
        jobs = [Job(number, folder, linked, linked_url) for number in range(STREAMS)]
        direct = ",".join(server.bootstrap_servers for server in servers)
        for job in jobs:
            create_topic(direct, job.topic, PARTITIONS, brokers)
            ledger.streams.register(job.stream.name, **Declared.by(job.stream).columns())
            stack.callback(job.stop)
        load = Load(direct, [job.topic for job in jobs])
        stack.callback(load.stop)
        yield Ground(servers, {"kafka": kafka_links, "ledger": [ledger_link]}, jobs, ledger, load)


def begin(on: Ground) -> None:
    """Start the jobs, and wait until they keep up."""
    for job in on.jobs:
        job.start()
    # Without records nothing would have to be stored, and the fault would meet jobs that still start.
    until("a record in each partition", lambda: all(on.load.newest().values()), _FOUND_SECONDS)
    on.until_stored("the first blocks", _FOUND_SECONDS)
    time.sleep(_STEADY_SECONDS)


def time_of_link(name: str, case: Case, on: Ground, seed: int) -> float:
    """The seconds from the end of the fault until all is stored."""
    if not case.at_start:
        begin(on)
    (link,) = on.links[case.part]

    def fault() -> None:
        if case.action is Action.FLAP:
            link.flap(case.seconds, seed, threading.Event())
        else:
            link.begin(case.action)
            time.sleep(case.seconds)
            link.end()

    thread = threading.Thread(target=fault)
    thread.start()
    if case.at_start:
        until("the fault", lambda: link.fault)
        for job in on.jobs:
            job.start()
    thread.join()
    assert link.affected, f"{name}: the fault met nothing"
    return on.until_stored(f"{name}: the blocks after the fault", _FOUND_SECONDS)


def longest_pause(steps: Steps, begin: float, end: float) -> float:
    """The longest time between two steps of a partition that is at least partly between these times."""
    pauses = [0.0]
    for reached in steps.values():
        times = [at for at, _ in reached] + [max(end, time.monotonic())]
        pauses += [after - before for before, after in itertools.pairwise(times) if after > begin and before < end]
    return max(pauses)


def pauses_of_leader(case: Case, on: Ground) -> tuple[float, float, float]:
    """The longest pauses of stored blocks from the SIGSTOP on and from the SIGCONT on, and that of Kafka."""
    begin(on)
    steps: Steps = {partition: [] for partition in on.load.acknowledged}

    def follow(seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for partition, offset in on.stored().items():
                if not steps[partition] or steps[partition][-1][1] < offset:
                    steps[partition].append((time.monotonic(), offset))
            time.sleep(_POLL_SECONDS)
        return time.monotonic()

    follow(2.0)
    direct = ",".join(server.bootstrap_servers for server in on.brokers)
    name = name_of_leader(direct, on.jobs[0].topic, on.brokers)
    leader = next(server for server in on.brokers if server.name == name)
    stopped = time.monotonic()
    leader.suspend()
    try:
        continued = follow(case.seconds)
    finally:
        leader.resume()
    ended = follow(_AFTER_HANG_SECONDS)
    for job in on.jobs:
        job.check()
    for partition, reached in steps.items():
        own = {partition: reached}, {partition: on.load.acknowledged[partition]}
        texts = [f"{longest_pause(each, stopped, ended):.1f} s" for each in own]
        print(f"{partition[0]}-{partition[1]}: longest pause {texts[0]}, of Kafka {texts[1]}", file=sys.stderr)
    return (
        longest_pause(steps, stopped, continued),
        longest_pause(steps, continued, ended),
        longest_pause(on.load.acknowledged, stopped, ended),
    )


def measures_of(name: str, case: Case, rounds: int) -> list[Measure]:
    """A case's figures in all rounds, each round on new servers."""
    labels = [f"{name} for {case.seconds:g} s: time until all is stored"]
    if name == LEADER:
        whose = f"{name} hangs for {case.seconds:g} s: longest pause"
        labels = [f"{whose} from the SIGSTOP on", f"{whose} from the SIGCONT on", f"{whose} of Kafka itself"]
    figures: list[tuple[float, ...]] = []
    for number in range(rounds):
        with bench_folder() as folder, ground(folder, 3 if name == LEADER else 1, silent=case.silent) as on:
            figures.append(pauses_of_leader(case, on) if name == LEADER else (time_of_link(name, case, on, number),))
        del on
        gc.collect()  # the jobs' Kafka clients, which would ask for brokers that are gone
        texts = ", ".join(f"{figure:.1f} s" for figure in figures[-1])
        print(f"{name}, round {number + 1}: {texts}; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    limits = (MAX_SECONDS,) * rounds
    columns = zip(*figures, strict=True)
    return [Measure(label, "s", own, "limit", limits) for label, own in zip(labels, columns, strict=True)]


def too_slow(measures: Sequence[Measure]) -> list[str]:
    """The names of those with a figure above its limit. Kafka's own pause has no limit."""
    return [each.name for each in measures if "Kafka itself" not in each.name and max(each.ratios) > 1]


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}. By default all.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="The fault's length, in place of the case's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each case.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure how soon receivers store blocks again after a fault of a link."""
    names = case or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        raise typer.BadParameter(f"{', '.join(unknown)}: there is no such case. There are {', '.join(CASES)}.")
    measures: list[Measure] = []
    for name in names:
        measures += measures_of(name, replace(CASES[name], seconds=seconds or CASES[name].seconds), rounds)
    print_measures(measures, as_json=as_json)
    if missed := too_slow(measures):
        sys.exit(f"Above {MAX_SECONDS:g} s: {'; '.join(missed)}.")


if __name__ == "__main__":
    typer.run(main)
