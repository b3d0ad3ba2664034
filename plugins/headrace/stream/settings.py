"""The settings of a stream: its limits (rule 12 of the design), its storage, Spark, and its listeners."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from headrace.secrets import url_holds_secret
from headrace.stream.model import CalledClass, Duration, Identifier, Part, Reference
from headrace.stream.place_names import check_no_placeholder
from headrace.stream.secrets import settings_with_secrets

MIB = 1024 * 1024


class Backpressure(Part):
    """Slows receivers down to the rate that batches can process, by Spark's PID estimate (with its defaults).

    The factors have no unit: ``proportional`` weighs the error of the rate, ``integral`` the backlog, ``derivative``
    the change of the error. Rates are records per second. Without ``initial_rate`` a rate is first set after the second
    completed batch, with it after the first.
    """

    proportional: NonNegativeFloat = 1.0
    integral: NonNegativeFloat = 0.2
    derivative: NonNegativeFloat = 0.0
    min_rate: PositiveFloat = 100.0
    """The lowest rate that is set for one receiver."""
    initial_rate: PositiveFloat | None = None
    """The rate of each receiver until the first estimate; None: no bound. For the backlog of a new stream."""


class Limits(Part):
    """Bounds on what a stream uses, each for one receiver unless stated otherwise."""

    max_block_bytes: PositiveInt = 16 * MIB
    max_queued_blocks: PositiveInt = 10
    prefetch_bytes: PositiveInt = 128 * MIB
    max_rate: PositiveFloat | None = None
    """Records per second; None: no bound."""
    max_rate_per_partition: PositiveFloat | None = None
    """Records per second of each partition, so that a busy one does not take the whole of ``max_rate``; None: no
    bound."""
    backpressure: Backpressure | None = None
    """How batches that take longer than their interval slow the receivers down; None: not at all."""
    max_log_bytes: PositiveInt | None = None
    """The log's bytes, of all receivers together. Above this, receiving pauses and Kafka keeps the rest. None: no
    bound."""
    segment_bytes: PositiveInt = 128 * MIB
    segment_interval: Duration = timedelta(seconds=60)
    store_timeout: Duration = Field(default=timedelta(seconds=30), le=timedelta(seconds=45))
    """How long one write to the log may take. A write to an object store, with the retries of its driver, then counts
    as failed. A write to a folder cannot be interrupted: the receiver then ends with an error, and starts again. The
    default is that of Spark's ``blockStoreTimeout``. At most 45 s: the tracker gives up a receiver that has not renewed
    its lease for 60 s."""
    seal_grace: Duration = timedelta(seconds=10)
    """How long a batch waits for live receivers to declare that they have stored all blocks of its batch time."""
    max_coalesced_records: PositiveInt = 500_000
    """Records of a batch that takes over other batch times; the next batch takes the rest. A single batch time may hold
    more."""
    max_coalesced_bytes: PositiveInt = 256 * MIB
    """The same bound in bytes, as stored in the log."""
    retry_for: Duration | None = None
    """How long a run of the schedule waits for a slot, and for the batches that must run before its own; by default
    30 s, or three batch intervals if they are longer."""
    max_concurrent_batches: PositiveInt = 1
    """Batches of the stream that run at the same time."""
    history: Duration | None = timedelta(days=30)
    """How long the ledger and the stream's folder keep a finished batch; None: forever. Older batches cannot be run or
    replayed again, not even from Kafka."""


class DeadLetterLimit(Part):
    """Bounds on the dead letters of one batch in one output, all tasks together. A batch with more of them fails.

    Records without a value do not count: ``tombstones`` of the output decides what happens to them.

    By default a batch fails when more than 100 rows and more than half of its rows are rejected. Damaged records are a
    small part of a healthy stream; if most are rejected, the mapping, the decoder or the transform is wrong. In a batch
    of a few records a share means nothing, so up to 100 letters never fail a batch.
    """

    number: NonNegativeInt | None = Field(default=None, description="The maximum number of letters; None: no maximum.")
    share: float = Field(
        default=0.5, ge=0, le=1, description="The maximum number of letters as a share of the rows; 1: no maximum."
    )
    tolerated: NonNegativeInt = Field(
        default=100, description="Up to this number of letters, the share is not checked."
    )

    def passed(self, letters: int, rows: int) -> str | None:
        """Text that names the bound that ``letters`` of ``rows`` exceed; None if they exceed none."""
        if self.number is not None and letters > self.number:
            return f"more than the {self.number:,} of dead_letter_limit.number"
        if letters > self.tolerated and letters > self.share * rows:
            return f"more than the {self.share:.0%} of dead_letter_limit.share"
        return None


class LocalCopies(Part):
    """Copies of recent blocks on the disks of the hosts that run receivers, for a log in an object store.

    Each receiver keeps a copy of its newest blocks. A batch's task on the same host reads them instead of the log.
    ``max_bytes`` is the most that the copies of the stream take on a host; the oldest are deleted first. ``folder`` is
    an absolute path, by default the temporary folder of the process (``TMPDIR``, else ``/tmp``). All receivers and
    batches of a host need the same.
    """

    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    folder: str | None = None

    @field_validator("folder")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("must be an absolute path: receivers and batches start in different folders")
        return value


class Storage(Part):
    """A folder by its absolute path or URL, or an ``s3://`` URL (any store whose fsspec driver creates objects
    conditionally).

    A local path with a Spark master of several hosts is refused, unless ``shared`` says that every host sees the same
    folder there (NFS, for example).
    """

    url: str = Field(min_length=1)
    shared: bool = False
    local_copies: LocalCopies | None = None
    """Copies of recent blocks on the executors' disks; None: no copies. Refused for a log that is itself in a
    folder."""

    @field_validator("url")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        return check_no_placeholder(check_storage_url(value), "folder", of_output=False)

    @model_validator(mode="after")
    def _copies_are_of_a_remote_log(self) -> Self:
        if self.local_copies is not None and self.is_local:
            raise ValueError(
                f"local_copies is for a log in an object store, and {self.url} is a folder, which is read directly; "
                "leave local_copies out"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of the machine's own file system."""
        return urlsplit(self.url).scheme in ("", "file")


def check_storage_url(value: str) -> str:
    """The URL or absolute path without a trailing slash. Raises ValueError, which the definition's error repeats."""
    parts = urlsplit(value)
    if not parts.scheme and not value.startswith("/"):
        raise ValueError(
            "must be an absolute path or a URL: the receiver, Spark and Airflow start in different folders"
        )
    if url_holds_secret(value):
        raise ValueError("holds a secret; give the store's credentials through its own environment or profile")
    if parts.scheme == "file" and (parts.query or parts.fragment):
        raise ValueError("is a URL whose path ends at ? or #; write them %3F and %23, or give the path without file:")
    return value.rstrip("/") or "/"


_LOCAL = re.compile(r"^local(?:\[(\*|[0-9]+)(?:,\s*[0-9]+)?\])?$")

# Settings that headrace sets itself, or that would open the Connect server to others (rules 12 and 13 of the design).
_RESERVED_CONF = (
    "spark.connect.",
    "spark.speculation",
    "spark.dynamicAllocation.enabled",
    "spark.plugins",
    # spark-submit has arguments for these; in conf they would bypass the checks of the arguments.
    "spark.master",
    "spark.submit.",
)

_DYNAMIC_ALLOCATION = "spark.dynamicAllocation."
_STREAMING = "spark.streaming."
# Prefixes of Spark Streaming's settings, and the field of the stream that replaces each.
_NAMES_HERE = {
    "spark.streaming.backpressure.": "limits.backpressure",
    "spark.streaming.blockInterval": "block_interval",
    "spark.streaming.blockQueueSize": "limits.max_queued_blocks",
    "spark.streaming.concurrentJobs": "limits.max_concurrent_batches",
    "spark.streaming.dynamicAllocation.": "spark.executors",
    "spark.streaming.kafka.maxRatePerPartition": "limits.max_rate_per_partition",
    "spark.streaming.receiver.maxRate": "limits.max_rate",
    "spark.streaming.receiver.writeAheadLog.": "storage and limits.segment_bytes",
}

# Each setting, file and master is one argument of spark-submit; these patterns keep it from being parsed otherwise.
_SETTING = re.compile(r"spark\.[^\s=]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MASTER = re.compile(r"[A-Za-z][^\s\x00-\x1f\x7f]*")
_FILE = re.compile(r"(?:/|[A-Za-z][A-Za-z0-9+.-]*://)[^,\x00-\x1f\x7f]*")


class ExecutorAllocation(Part):
    """Adds and releases executors by how long batches take, by Spark Streaming's dynamic allocation (and its defaults).

    The ratio is the average processing time of the batches that completed in a scaling interval, divided by the batch
    interval. At ``scaling_up_ratio`` or more, as many executors are added as the rounded ratio, at least one. At
    ``scaling_down_ratio`` or less, one that runs no receiver is released.
    """

    minimum: PositiveInt | None = None
    """The number of executors that are kept; None: one for each receiver. It is raised if these executors have no task
    slot for a batch beside the receivers."""
    maximum: PositiveInt | None = None
    """The number of executors that is not exceeded by requests; None: no bound. A larger minimum is stronger."""
    scaling_interval: Duration = timedelta(seconds=60)
    scaling_up_ratio: PositiveFloat = 0.9
    scaling_down_ratio: PositiveFloat = 0.3

    @model_validator(mode="after")
    def _bounds_do_not_cross(self) -> Self:
        if self.scaling_up_ratio <= self.scaling_down_ratio:
            raise ValueError("scaling_up_ratio must be more than scaling_down_ratio")
        if self.minimum is not None and self.maximum is not None and self.maximum < self.minimum:
            raise ValueError("maximum must not be less than minimum")
        return self


class SparkSettings(Part):
    """The cluster, its configuration and how batches run on it.

    ``run_batches``: ``connect`` runs a batch in the receiver job's application over Spark Connect (warm, starts
    in about a second), ``submit`` runs each batch in its own application (isolated, about 15 s to start).
    """

    master: str | None = Field(
        default=None, description="By default this machine, with a task slot for each core and one for each receiver."
    )
    connection: str | None = Field(default=None, description="An Airflow connection of type spark, instead of master.")
    conf: dict[str, str] = Field(default_factory=dict)
    py_files: tuple[str, ...] = ()
    run_batches: Literal["connect", "submit"] = "connect"
    job: Identifier | None = Field(
        default=None,
        description="The name of a job that runs the receivers of all streams of the ledger that name it, in one Spark "
        "application. By default the stream's receivers have a job of their own.",
    )

    executors: ExecutorAllocation | None = Field(
        default=None,
        description="Adds and releases executors of the receiver job on a cluster by how long batches take. By default "
        "their number does not change.",
    )

    @field_validator("conf")
    @classmethod
    def _conf_leaves_the_rest_to_headrace(cls, value: dict[str, str]) -> dict[str, str]:
        refused = sorted(name for name in value if name.startswith(_RESERVED_CONF))
        if refused:
            raise ValueError(f"{', '.join(refused)} is set by headrace; leave it out")
        streaming = sorted(name for name in value if name.startswith(_STREAMING))
        if streaming:
            raise ValueError(f"{', '.join(map(_name_here, streaming))}: headrace reads no setting of Spark Streaming")
        strange = sorted(name for name in value if not _SETTING.fullmatch(name))
        if strange:
            raise ValueError(f"{', '.join(map(repr, strange))} is not a Spark setting: settings begin with spark.")
        broken = sorted(name for name, text in value.items() if _CONTROL.search(text))
        if broken:
            raise ValueError(f"{', '.join(broken)} holds a control character")
        secret = settings_with_secrets(value)
        if secret:
            raise ValueError(
                f"{', '.join(secret)} holds a secret by its name or value; the definition is stored in clear, and its "
                "settings are on spark-submit's command line; put it into an Airflow connection that the stream names "
                "(executors get AIRFLOW_CONN_… from headrace), into the cluster's spark-defaults.conf, or into the "
                "environment where Spark runs; on Kubernetes name it by spark.kubernetes.executor.secretKeyRef.…"
            )
        return value

    @field_validator("master")
    @classmethod
    def _master_holds_no_secret(cls, value: str | None) -> str | None:
        if value is not None and url_holds_secret(value):
            raise ValueError("holds a secret; put it into an Airflow connection and name that in connection")
        if value is not None and not _MASTER.fullmatch(value):
            raise ValueError("is no Spark master: one word that begins with a letter")
        return value

    @field_validator("py_files")
    @classmethod
    def _py_files_are_absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        secret = [str(index) for index, name in enumerate(value) if url_holds_secret(name)]
        if secret:
            raise ValueError(
                f"hold a login or a signature in entry {', '.join(secret)}, and the definition is stored in clear; use "
                "a URL without one, or a path on the hosts, and give the store's credentials through the environment"
            )
        relative = [name for name in value if not _FILE.fullmatch(name)]
        if relative:
            raise ValueError(
                f"{', '.join(map(repr, relative))} must be an absolute path or URL, without commas: Spark and Airflow "
                "start in different folders"
            )
        return value

    @model_validator(mode="after")
    def _one_place_names_the_cluster(self) -> Self:
        if self.master is not None and self.connection is not None:
            raise ValueError("give master or connection, not both: each of them names the cluster")
        if self.job is not None and self.master is None and self.connection is None:
            raise ValueError(
                "job needs master or connection, because the task slots of a job that streams share are not derived "
                "from one of them; on one machine count a slot for each receiver of these streams and one for each "
                'core, such as master="local[24]" for 20 receivers and 4 cores'
            )
        return self

    @model_validator(mode="after")
    def _executors_are_those_of_batches(self) -> Self:
        if self.executors is None:
            return self
        if self.is_local:
            raise ValueError("executors needs a cluster in master or connection: a local master has no executors")
        if self.run_batches == "submit":
            raise ValueError(
                'executors needs run_batches="connect": batches that are submitted do not run on the executors of the '
                "receiver job"
            )
        if self.job is not None:
            raise ValueError("executors cannot be used with job: the streams of a shared job have the same executors")
        both = sorted(name for name in self.conf if name.startswith(_DYNAMIC_ALLOCATION))
        if both:
            raise ValueError(
                f"executors cannot be used with {', '.join(both)}: Spark's own dynamic allocation is off; give the "
                "bounds in executors"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether driver and executors are one process on this machine."""
        return self.connection is None and (self.master is None or _LOCAL.match(self.master) is not None)

    def master_url(self, receivers: int) -> str:
        """The master for an application with this many receivers.

        A receiver mostly waits for Kafka and for the disk, so on one machine it gets a task slot in addition to one
        slot per core for batches.
        """
        return self.master or f"local[{receivers + (os.cpu_count() or 1)}]"

    def task_slots(self) -> int | None:
        """How many tasks can run at once, if the definition sets a bound; None if it does not."""
        if self.connection is not None or self.master is None:
            return None
        match = _LOCAL.match(self.master)
        if match is None:
            cores = self.conf.get("spark.cores.max")
            return int(cores) if cores is not None and cores.isascii() and cores.isdigit() else None
        if match[1] is None:
            return 1
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def _name_here(setting: str) -> str:
    """The name of a Spark Streaming setting, with the field to set instead if there is one."""
    fields = [field for beginning, field in _NAMES_HERE.items() if setting.startswith(beginning)]
    return f"{setting} (set the stream's {fields[0]} instead)" if fields else setting


class Listener(CalledClass):
    """A `headrace.listeners.StreamListener` that runs in the driver of the stream's receiver job.

    ``reference`` is "module:Class", which is called with ``arguments``, or "module:instance", which has none.
    """

    reference: Reference = Field(description='"module:Class" or "module:instance"')
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="Names its cursor; by default the reference."
    )

    @property
    def id(self) -> str:
        """The name, by default the reference: it distinguishes the listeners of a stream."""
        return self.name or self.reference

    def __str__(self) -> str:
        connection = "" if self.connection is None else f", connection {self.connection}"
        return f"{self.id} ({self.reference} {json.dumps(self.arguments)}{connection})"
