"""One run of the hammer, from an empty folder to the judgement."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.kafka_side import offsets
from tests.hammer.errors import HammerError
from tests.hammer.evidence import keep_evidence
from tests.hammer.examining import examine_batches, examine_records, run_fsck
from tests.hammer.fault_injector import FaultInjector
from tests.hammer.ground import Ground
from tests.hammer.journal import Journal
from tests.hammer.judgement import Judgement
from tests.hammer.kinds import Fault, LedgerKind
from tests.hammer.load import Load
from tests.hammer.onlooker import Onlooker
from tests.hammer.pipeline import STREAM, TOPIC, records
from tests.hammer.schedule import ScheduleOptions, make_schedule
from tests.hammer.services import Services
from tests.hammer.target_processes import TargetProcesses
from tests.hammer.watching import Watch
from tests.support.ledger_rules import broken_rules

from headrace.ledger import Ledger

_WARM_SECONDS = 600.0
_SERVERS_SECONDS = 300.0
# After this long without any progress, none is expected any more.
_STALL_SECONDS = 600.0
_LAST_LOAD_SECONDS = 10.0
_ONE_JOB_SECONDS = 120.0
_MAX_BATCHES = 100_000


@dataclass(frozen=True, slots=True)
class HammerOptions:
    """``rate`` is in records a second; the stack and the results are in ``data``, which each run empties."""

    schedule: ScheduleOptions
    data: Path
    rate: float = 400.0
    ledger: LedgerKind = LedgerKind.POSTGRES
    keys: bool = True


def run_hammer(options: HammerOptions, say: Callable[[str], None]) -> Judgement:
    """Run the hammer. Call it in a process with one thread, because it may make its own mount namespace.

    Raises:
        HeadraceError: the run did not reach its end. The evidence is kept, as for a judgement that does not hold.
    """
    faults = make_schedule(options.schedule)
    say(f"seed {options.schedule.seed}: {len(faults)} faults in {options.schedule.minutes:g} minutes")
    for fault in faults:
        say(f"  {fault}")
    ground = Ground(
        options.data,
        cluster=options.schedule.cluster,
        ledger=options.ledger,
        keys=options.keys,
        network=options.schedule.network,
        brokers=options.schedule.brokers,
        targets={fault.kind.target for fault in faults},
    )
    faults = [fault for fault in faults if fault.kind.target not in ground.impossible]
    for target, why in ground.impossible.items():
        say(f"no fault of {target}: {why}")
    journal = Journal(ground.data / "faults.jsonl", say)
    began = time.monotonic()
    journal.say("starting Kafka, Elasticsearch, Postgres and Airflow" + (" and Spark" if ground.cluster else ""))
    with ground, Ledger.open(ground.ledger_url) as ledger:
        run = _Run(options, ground, ledger, journal)
        run.seconds["start"] = round(time.monotonic() - began, 1)
        try:
            judgement = run.to_its_end(faults)
        except Exception:
            _keep(ground, say)
            raise
        finally:
            say("stopping everything")
        if not judgement.holds:
            _keep(ground, say)
    return judgement


class _Run:
    """The phases of a run on a ground that has been started."""

    def __init__(self, options: HammerOptions, ground: Ground, ledger: Ledger, journal: Journal) -> None:
        self.seconds: dict[str, float] = {}
        self._seed = options.schedule.seed
        self._ground = ground
        self._ledger = ledger
        self._journal = journal
        self._targets = TargetProcesses(ground.stack_id, STREAM, ground.log)
        self._services = Services(ground.servers, journal)
        self._injector = FaultInjector(
            targets=self._targets,
            services=self._services,
            disks=ground.disks,
            delete_ledger=ground.delete_ledger,
            shrink_ledger=ground.shrink_ledger,
            journal=journal,
            links=ground.links,
            leader=ground.leader,
            syncs=ground.syncs,
            clock=ground.clock,
            look=Onlooker(ground.shown_ledger_url, STREAM).look,
        )
        self._elasticsearch = ElasticsearchSide(ground.elasticsearch.url)
        self._load = Load(ground.bootstrap_servers, TOPIC, records(self._seed), rate=options.rate)
        self._watch = Watch(ledger, self._elasticsearch, self._load, journal)

    def to_its_end(self, faults: Sequence[Fault]) -> Judgement:
        """All phases."""
        try:
            with self._watch:
                self._warm_up()
                with self._services:
                    self._inject_all(faults)
                    self._heal()
                    self._settle()
                    return self._judge(faults)
        finally:
            self._injector.release()
            self._load.give_up()

    def _warm_up(self) -> None:
        """Run until a batch with records is cleaned up, which shows that everything works."""
        began = time.monotonic()
        self._ground.begin()
        self._load.start()
        self._watch.until(lambda snapshot: snapshot.cleaned > 0, stall=_WARM_SECONDS)
        self.seconds["warm-up"] = round(time.monotonic() - began, 1)

    def _inject_all(self, faults: Sequence[Fault]) -> None:
        self._journal.begin()
        self._journal.say("the schedule begins")
        threads = []
        for fault in faults:
            while (wait := fault.at - self._journal.now()) > 0:
                self._load.check()
                time.sleep(min(wait, 1.0))
            thread = threading.Thread(target=self._injector.inject, args=(fault,), name=str(fault), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        self.seconds["faults"] = self._journal.now()

    def _heal(self) -> None:
        """Wait until all servers answer, then send more load, which a stream that only seems alive does not process."""
        self._journal.say("the schedule is over; waiting until all servers answer")
        self._injector.release()
        silent = self._services.await_all(_SERVERS_SECONDS)
        if silent:
            raise HammerError(f"{', '.join(silent)} did not come up again.")
        time.sleep(_LAST_LOAD_SECONDS)
        self._load.stop()
        self._journal.say(f"the load is over, {self._load.acknowledged} records are acknowledged")

    def _settle(self) -> None:
        began = time.monotonic()
        ends = offsets(self._ground.bootstrap_servers, TOPIC)
        self._watch.expect(sum(end - first for first, end in ends.values()))
        self._watch.until(lambda snapshot: snapshot.settled, stall=_STALL_SECONDS)
        deadline = time.monotonic() + _ONE_JOB_SECONDS
        # A zombie receiver job has this time to notice that it was replaced.
        while self._targets.jobs() != 1 and time.monotonic() < deadline:
            time.sleep(0.5)
        self.seconds["settling"] = round(time.monotonic() - began, 1)

    def _judge(self, faults: Sequence[Fault]) -> Judgement:
        self._journal.say("judging")
        servers = self._ground.bootstrap_servers
        kafka, proof, keys = examine_records(
            servers, self._elasticsearch, self._load, seed=self._seed, keys=self._ground.keys
        )
        batches = self._ledger.batches.page(STREAM, _MAX_BATCHES)
        return Judgement(
            seed=self._seed,
            kafka=kafka,
            proof=proof,
            keys=keys,
            refused=len(self._load.receipts.refused),
            planned=faults,
            injections=self._journal.injections,
            collateral=self._journal.collateral,
            batches=Counter(batch.state.value for batch in batches if batch.records),
            uncovered=examine_batches(self._ledger, servers),
            gaps=[str(gap) for gap in self._ledger.gaps.page(STREAM)],
            receiver_jobs=self._targets.jobs(),
            fsck=run_fsck(self._ground.ledger_url, self._ground.airflow.environment()),
            broken_rules=list(map(str, broken_rules(self._ledger, STREAM))),
            not_possible=[f"{target}: {why}" for target, why in self._ground.impossible.items()],
            seconds=self.seconds,
        )


def _keep(ground: Ground, say: Callable[[str], None]) -> None:
    try:
        folder = keep_evidence(ground.data, ground.log, ground.ledger_url, ground.stack_id)
    except OSError as error:
        say(f"not all evidence could be kept: {error}")
    else:
        say(f"the evidence is in {folder}, the servers' logs and data in {ground.data}")
