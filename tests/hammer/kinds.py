"""The kinds of faults: each has a target and an action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class LedgerKind(StrEnum):
    """The database that holds the ledger."""

    POSTGRES = "postgres"
    SQLITE = "sqlite"


class Target(StrEnum):
    """The target of a fault. The values are for people and for `--only`."""

    RECEIVER_TASK = "receiver-task"
    """The Python worker of a Spark task that receives."""
    RECEIVER_DRIVER = "receiver-driver"
    """The receiver job's Python driver."""
    RECEIVER_JVM = "receiver-jvm"
    """The receiver job's JVM, which on one machine is its only executor too."""
    RECEIVER_JOB = "receiver-job"
    """All processes of the receiver job, as when its host goes."""
    BATCH = "batch"
    """A process that runs a batch."""
    SCHEDULER = "scheduler"
    TRIGGERER = "triggerer"
    API_SERVER = "api-server"
    DAG_PROCESSOR = "dag-processor"
    KAFKA = "kafka"
    ELASTICSEARCH = "elasticsearch"
    POSTGRES = "postgres"
    """Airflow's database, and the ledger's by default."""
    DISK = "disk"
    """The file system of the log."""
    LEDGER_DISK = "ledger-disk"
    """The file system of the ledger's database."""
    SYNCS = "syncs"
    """What makes the log's bytes durable, in all processes of Python."""
    CLOCK = "clock"
    """The clock of the receiver job, from its start on."""
    LEDGER = "ledger"
    """The ledger's database, and with it all processes of the stream, as when their host goes with its disk."""
    EXECUTOR = "executor"
    """An executor's JVM of the cluster, with its Python workers."""
    WORKER = "spark-worker"
    """A worker of the cluster, with its executors."""
    KAFKA_LINK = "kafka-link"
    """The network between the receivers, and all that headrace does with Kafka, and the brokers."""
    LEDGER_LINK = "ledger-link"
    """The network between the ledger's Postgres and the receiver job, Airflow's tasks and its pages."""
    SEARCH_LINK = "search-link"
    """The network between batches and the search server."""
    LEADER = "leader"
    """The broker that leads the topic's first partition, of three."""

    @property
    def is_server(self) -> bool:
        """Whether the service manager restarts it, not headrace or Spark."""
        return self in _SERVERS

    @property
    def is_link(self) -> bool:
        """Whether it is a link of the network between two parts."""
        return self in LINKS

    @property
    def is_of_host(self) -> bool:
        """Whether only a run that asks for it has its faults: those of a host beside the log's full disk."""
        return self in (Target.LEDGER_DISK, Target.SYNCS, Target.CLOCK)


class Action(StrEnum):
    """What is done to it."""

    KILL = "kill -9"
    TERM = "SIGTERM"
    HANG = "SIGSTOP"
    """Stopped for a while, then continued."""
    RESTART = "restart"
    """Stopped in order, and started again after a while."""
    FILL = "full"
    """No byte is free for a while."""
    DELETE = "deleted"
    """Nothing of it is left."""
    CUT = "cut"
    """Connections are reset, and new ones refused."""
    RESET = "reset"
    """All connections are reset once; new ones work."""
    BLACKHOLE = "blackhole"
    """Connections stay open, and nothing passes."""
    LOSE_ANSWERS = "lost answers"
    """Requests pass, and are carried out; their answers are lost."""
    DELAY = "delay"
    """Every piece of data comes late."""
    TRICKLE = "trickle"
    """Data passes by a few bytes at a time."""
    FLAP = "flapping"
    """Cut and healed in turn, every second or so."""
    SLOW = "slow"
    """Each takes some seconds."""
    HOUR_AHEAD = "an hour ahead"
    HOUR_BEHIND = "an hour behind"
    YEAR_AHEAD = "a year ahead"
    YEAR_BEHIND = "a year behind"


_SERVERS = frozenset(
    {
        Target.SCHEDULER,
        Target.TRIGGERER,
        Target.API_SERVER,
        Target.DAG_PROCESSOR,
        Target.KAFKA,
        Target.ELASTICSEARCH,
        Target.POSTGRES,
        Target.WORKER,
        Target.LEADER,
    }
)

LINKS = (Target.KAFKA_LINK, Target.LEDGER_LINK, Target.SEARCH_LINK)


@dataclass(frozen=True, slots=True)
class Words:
    """What a person is shown of a part: one of the words for ``part``, and with them ``remedy``, or any remedy."""

    part: tuple[str, ...]
    remedy: str = ""


WORDS: Mapping[Target, Words] = {
    Target.KAFKA_LINK: Words(("Kafka",)),
    Target.LEDGER_LINK: Words(("ledger", "Postgres")),
    Target.SEARCH_LINK: Words(("Elasticsearch", "search server", "elasticsearch_default")),
    Target.DISK: Words(("No space left on device",), "make room in the stream's storage"),
    Target.LEDGER_DISK: Words(("disk of the ledger",), "Make room on"),
    Target.SYNCS: Words(("a sync of the log takes",), "Look at the disk"),
    Target.CLOCK: Words(("the ledger's clock",), "Correct the clock"),
}
"""For a link, those of the part behind it."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A range to draw a duration from."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Kind:
    """A target and an action. ``holds`` are the ranges of how long it is held, of which one is drawn."""

    target: Target
    action: Action
    holds: tuple[Seconds, ...] = (Seconds(0, 0),)
    cluster_only: bool = False
    visible_after: float | None = None
    """A stream that suffers from it for so many seconds or longer has to name the part and a remedy."""

    @property
    def name(self) -> str:
        """For people and for counts."""
        return f"{self.target} {self.action}"


# A fault that lasts longer is one that a person sees: a lease of 30 s ends within it, and a batch of 30 s is due.
_VISIBLE_SECONDS = 45.0
# One that the receivers report: with their heartbeats, of which there are several within it.
_REPORTED_SECONDS = 25.0
_DOWN = (Seconds(1, 5), Seconds(5, 25))
_HUNG = (Seconds(2, 6), Seconds(15, 35))
# Leases: a receiver's has 10 s, those of a receiver job and of an attempt at a batch 30 s. A zombie comes back later.
_PAST_A_RECEIVERS_LEASE = (Seconds(2, 5), Seconds(13, 22))
_PAST_A_JOBS_LEASE = (Seconds(3, 8), Seconds(35, 50))
_IN_A_LINK = (Seconds(2, 8), Seconds(50, 65))
_LINK_FAULTS = (
    (Action.CUT, True),
    (Action.BLACKHOLE, True),
    (Action.LOSE_ANSWERS, True),
    (Action.DELAY, False),
    (Action.TRICKLE, False),
    (Action.FLAP, False),
)

KINDS: tuple[Kind, ...] = (
    Kind(Target.RECEIVER_TASK, Action.KILL),
    Kind(Target.RECEIVER_TASK, Action.HANG, _PAST_A_RECEIVERS_LEASE),
    Kind(Target.RECEIVER_DRIVER, Action.KILL),
    Kind(Target.RECEIVER_DRIVER, Action.TERM),
    Kind(Target.RECEIVER_DRIVER, Action.HANG, _PAST_A_JOBS_LEASE),
    Kind(Target.RECEIVER_JVM, Action.KILL),
    Kind(Target.RECEIVER_JVM, Action.HANG, _PAST_A_JOBS_LEASE),
    Kind(Target.RECEIVER_JOB, Action.KILL),
    Kind(Target.BATCH, Action.KILL),
    Kind(Target.BATCH, Action.TERM),
    Kind(Target.BATCH, Action.HANG, _PAST_A_JOBS_LEASE),
    Kind(Target.SCHEDULER, Action.KILL, _DOWN),
    Kind(Target.SCHEDULER, Action.HANG, _HUNG),
    Kind(Target.SCHEDULER, Action.RESTART, _DOWN),
    Kind(Target.TRIGGERER, Action.KILL, _DOWN),
    Kind(Target.TRIGGERER, Action.HANG, _HUNG),
    Kind(Target.TRIGGERER, Action.RESTART, _DOWN),
    Kind(Target.API_SERVER, Action.KILL, _DOWN),
    Kind(Target.API_SERVER, Action.HANG, _HUNG),
    Kind(Target.API_SERVER, Action.RESTART, _DOWN),
    Kind(Target.DAG_PROCESSOR, Action.KILL, _DOWN),
    Kind(Target.KAFKA, Action.KILL, _DOWN),
    Kind(Target.KAFKA, Action.HANG, _HUNG),
    Kind(Target.KAFKA, Action.RESTART, _DOWN),
    Kind(Target.ELASTICSEARCH, Action.KILL, _DOWN),
    Kind(Target.ELASTICSEARCH, Action.HANG, _HUNG),
    Kind(Target.ELASTICSEARCH, Action.RESTART, _DOWN),
    Kind(Target.POSTGRES, Action.KILL, _DOWN),
    Kind(Target.POSTGRES, Action.HANG, _HUNG),
    Kind(Target.POSTGRES, Action.RESTART, _DOWN),
    Kind(Target.DISK, Action.FILL, (Seconds(10, 20), Seconds(30, 60)), visible_after=_REPORTED_SECONDS),
    Kind(Target.LEDGER, Action.DELETE, (Seconds(1, 5), Seconds(20, 60))),
    Kind(Target.EXECUTOR, Action.KILL, cluster_only=True),
    Kind(Target.EXECUTOR, Action.HANG, _PAST_A_RECEIVERS_LEASE, cluster_only=True),
    Kind(Target.WORKER, Action.KILL, _DOWN, cluster_only=True),
    Kind(Target.WORKER, Action.RESTART, _DOWN, cluster_only=True),
    *(
        Kind(link, action, _IN_A_LINK, visible_after=_VISIBLE_SECONDS if visible else None)
        for link in LINKS
        for action, visible in _LINK_FAULTS
    ),
    *(Kind(link, Action.RESET) for link in LINKS),
    Kind(Target.LEADER, Action.KILL, _DOWN),
    Kind(Target.LEADER, Action.HANG, _HUNG),
    Kind(Target.LEDGER_DISK, Action.FILL, (Seconds(10, 20), Seconds(46, 60)), visible_after=_VISIBLE_SECONDS),
    Kind(Target.SYNCS, Action.SLOW, (Seconds(5, 15), Seconds(46, 60)), visible_after=_VISIBLE_SECONDS),
    *(
        Kind(Target.CLOCK, action, (Seconds(46, 60),), visible_after=_VISIBLE_SECONDS)
        for action in (Action.HOUR_AHEAD, Action.HOUR_BEHIND, Action.YEAR_AHEAD, Action.YEAR_BEHIND)
    ),
)

BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Times are seconds: ``at`` from the schedule's start, ``aim`` from finding the target to the injection,
    ``hold`` from the injection to its end. ``pick`` in [0, 1) chooses among several processes that could be hit.
    """

    number: int
    at: float
    kind: Kind
    aim: float
    hold: float
    pick: float

    @property
    def is_visible(self) -> bool:
        """Whether it lasts so long that the part and a remedy have to be shown."""
        return self.kind.visible_after is not None and self.hold >= self.kind.visible_after

    def __str__(self) -> str:
        held = f" for {self.hold:.1f} s" if self.hold else ""
        return f"#{self.number} at {self.at:.1f} s: {self.kind.name}{held}"
