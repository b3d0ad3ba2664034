"""The fields of a stream's definition, each valid by itself, and the values that are derived from them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, PositiveInt, field_validator

from headrace.connections import CONNECTION_PREFIX
from headrace.secrets import url_holds_secret
from headrace.stream.contract import KindDefinition
from headrace.stream.inputs import Input, KafkaInput
from headrace.stream.model import Duration, Identifier, Part, Reference, milliseconds
from headrace.stream.outputs import ElasticsearchOutput, KafkaOutput, Output
from headrace.stream.secrets import values_with_secrets
from headrace.stream.settings import Limits, Listener, SparkSettings, Storage
from headrace.stream.state import STATE_STEP, State

# The least default of limits.retry_for; it is three batch intervals if those are longer.
_RETRY_FOR = timedelta(seconds=30)


class BatchTrigger(Part):
    """Starts a batch as soon as ``min_records`` are waiting, or the oldest has waited for ``max_delay``.

    The batch takes everything received in intervals that have ended. So the batch interval is the trigger's resolution;
    one to a few seconds is best.
    """

    min_records: PositiveInt
    max_delay: Duration

    @property
    def max_delay_ms(self) -> int:
        """The longest time in milliseconds that a record waits for a batch to be triggered."""
        return milliseconds(self.max_delay)


class StreamFields(Part):
    """The fields of a `Stream`. `Stream` also checks that they fit together."""

    name: Identifier
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    transform: Reference | None = Field(
        default=None, description='"module:function": gets a DataFrame for each input, by its id; returns one.'
    )
    batch_interval: Duration
    block_interval: Duration = timedelta(milliseconds=200)
    checkpoint_interval: Duration | None = Field(default=None, description="By default the batch interval.")
    remember: Duration | None = Field(
        default=None,
        description="How long the log keeps a batch's blocks after it is checkpointed; by default the batch interval, "
        "and what the longest window reaches back.",
    )
    batch_by: Literal["arrival", "timestamp"] = Field(
        default="arrival",
        description="The time that decides a record's batch: when it was stored in the log, or its timestamp in Kafka "
        "(the latest one so far in its partition).",
    )
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = Field(
        default="exactly_once",
        description="What a power failure may do to records that were received: nothing; or the log on a local disk is "
        "not synced for each block, and what was lost is read from Kafka again, or is given up and recorded as a gap.",
    )
    allowed_lateness: Duration = Field(
        default=timedelta(seconds=10),
        description="How long a batch by timestamp waits, after its interval has ended, for records of a partition "
        "that has nothing newer. Later records join the next open batch, and are counted as late.",
    )
    coalesce: bool | None = Field(
        default=None,
        description="Whether a run of the schedule takes over all batch times that have ended and have no batch, as "
        "one batch, so that a late stream catches up; otherwise each batch time is its own batch. By default true with "
        "batch_by arrival and without windows.",
    )
    trigger: BatchTrigger | None = Field(
        default=None, description="Start batches by the records received instead of by the clock. Implies coalesce."
    )
    state: State | None = None
    ordered: bool | None = Field(
        default=None,
        description="Run one batch at a time, in the order of batch times. Streams with windows, with state, or with "
        "documents that a later batch replaces are always ordered.",
    )
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Values that transforms find in batch.parameters. A DAG run's conf may override them by name.",
    )
    storage: Storage
    recover: Literal["manual", "automatic"] = Field(
        default="manual",
        description="Who rebuilds a lost ledger from the stream's folder: a person (`headrace streams recover`), or "
        "the task of the receiver job before it starts the job.",
    )
    listeners: tuple[Listener, ...] = Field(
        default=(), description='Called when something happens; "module:Class" stands for a `Listener`.'
    )
    ledger: str = Field(description='A SQLAlchemy URL without a password, or "connection:<Airflow connection id>".')
    limits: Limits = Limits()
    spark: SparkSettings = SparkSettings()

    @field_validator("inputs", "outputs", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return value if isinstance(value, (list, tuple)) else (value,)

    @field_validator("listeners", mode="before")
    @classmethod
    def _listeners_by_their_references(cls, value: object) -> object:
        several = value if isinstance(value, (list, tuple)) else (value,)
        return tuple({"reference": listener} if isinstance(listener, str) else listener for listener in several)

    @field_validator("storage", mode="before")
    @classmethod
    def _storage_by_its_url(cls, value: object) -> object:
        return {"url": str(value)} if isinstance(value, (str, Path)) else value

    @field_validator("parameters")
    @classmethod
    def _parameters_hold_no_secret(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        named = values_with_secrets(value)
        if named:
            raise ValueError(
                f"hold a login or a secret in {', '.join(named)}, and the definition is stored in clear; leave it out, "
                "and let the transform read it from the environment of its process"
            )
        return value

    @field_validator("ledger")
    @classmethod
    def _ledger_holds_no_secret(cls, value: str) -> str:
        if value.startswith(CONNECTION_PREFIX):
            if not value.removeprefix(CONNECTION_PREFIX):
                raise ValueError("names no connection after connection:")
            return value
        if url_holds_secret(value):
            raise ValueError(
                "holds a password, and the definition is stored in clear; put the URL into an Airflow connection and "
                "write connection:<its id>, or leave the password to PGPASSWORD or a pgpass file"
            )
        parts = urlsplit(value)
        if parts.scheme.split("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError("must be a sqlite:/// or postgresql+psycopg:// URL, or connection:<Airflow connection id>")
        if parts.scheme.startswith("sqlite") and not parts.path.startswith("//"):
            raise ValueError("must name the file by its absolute path: sqlite:////folder/ledger.db")
        return value

    @property
    def batch_interval_ms(self) -> int:
        """Milliseconds from one batch time to the next."""
        return milliseconds(self.batch_interval)

    @property
    def block_interval_ms(self) -> int:
        """Milliseconds after which a receiver cuts a block."""
        return milliseconds(self.block_interval)

    @property
    def checkpoint_interval_ms(self) -> int:
        """Milliseconds from one checkpoint to the next."""
        return milliseconds(self.checkpoint_interval or self.batch_interval)

    @property
    def remember_ms(self) -> int:
        """Milliseconds for which the log keeps the blocks of a batch after its checkpoint.

        With windows, at least the reach of the longest window plus one batch interval: what the newest window needs.
        (Spark remembers a window's length plus its slide.)
        """
        asked = milliseconds(self.remember or self.batch_interval)
        windows = self.window_ms
        return asked if windows == 0 else max(asked, windows + self.batch_interval_ms)

    @property
    def window_ms(self) -> int:
        """Milliseconds that the longest window, of an output or of the state, reaches back; 0 without windows.

        An output's window reaches back to the end of the window before it, if that is earlier than its own start.
        """
        interval_ms = self.batch_interval_ms
        lengths = [output.window.reach_ms(interval_ms) for output in self.outputs if output.window is not None]
        if self.state is not None and self.state.window is not None:
            lengths.append(milliseconds(self.state.window))
        return max(lengths, default=0)

    @property
    def allowed_lateness_ms(self) -> int:
        """Milliseconds that a batch by timestamp waits for partitions without newer records."""
        return milliseconds(self.allowed_lateness)

    @property
    def retry_for_ms(self) -> int:
        """Milliseconds for which a run of the schedule waits for a slot and for its batch's turn."""
        return milliseconds(self.limits.retry_for or max(_RETRY_FOR, 3 * self.batch_interval))

    @property
    def coalesces(self) -> bool:
        """Whether runs of the schedule, or of the trigger, take over the batch times that have no run."""
        if self.trigger is not None:
            return True
        # A window is written at every batch time. The window of a batch time without its own batch would be missing.
        return self.batch_by == "arrival" and not self.window_ms if self.coalesce is None else self.coalesce

    @property
    def is_ordered(self) -> bool:
        """Whether batches run one at a time, in the order of batch times (rule 6 of the design)."""
        return bool(self.ordered) or any(self.reasons_for_order())

    @property
    def versioned_by_offsets(self) -> list[str]:
        """The ids of the outputs that use a record's offset as the version of its key."""
        return [output.id for output in self.outputs if output.versions_by_offset]

    def reasons_for_order(self) -> Iterator[str]:
        """Yield a clause for each part of the stream that needs the order of batch times. None: every order of the
        batches gives the same result."""
        if self.state is not None:
            yield "each batch starts from the state that the one before left"
        for output in self.outputs:
            if output.window is not None:
                yield f"output {output.id!r} has a window over earlier batches"
            for reason in output.reasons_for_order():
                yield f"output {output.id!r} {reason}"

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of a batch's steps in the ledger: the update of the state, if there is one, then each output's
        first id."""
        return tuple(self.step_of_id.values())

    @property
    def step_of_id(self) -> dict[str, str]:
        """The steps by the ids that the definition gives them. They differ if an output was renamed."""
        state = {} if self.state is None else {STATE_STEP: STATE_STEP}
        return state | {output.id: output.step for output in self.outputs}

    @property
    def kafka_inputs(self) -> tuple[KafkaInput, ...]:
        """The inputs that read Kafka: their records can be read again as long as Kafka keeps them."""
        return tuple(kafka for source in self.inputs if (kafka := source.in_kafka) is not None)

    @property
    def kafka_outputs(self) -> tuple[KafkaOutput, ...]:
        """The outputs that write to Kafka."""
        return tuple(output for output in self.outputs if isinstance(output, KafkaOutput))

    @property
    def elasticsearch_outputs(self) -> tuple[ElasticsearchOutput, ...]:
        """The outputs that write documents: for what only documents have, such as dead letters and a trace by id."""
        return tuple(output for output in self.outputs if isinstance(output, ElasticsearchOutput))

    @property
    def receivers(self) -> int:
        """The number of receivers of all inputs together."""
        return sum(source.receivers for source in self.inputs)

    @property
    def application(self) -> str:
        """The name of what runs the receivers: the stream's, or ``@`` and the name of the job that it shares.

        A stream's name has no ``@``, so the names differ.
        """
        return self.name if self.spark.job is None else f"@{self.spark.job}"

    @property
    def folder_url(self) -> str:
        """The stream's own folder in its storage: log/, manifests/, checkpoints/, reports/ and state/ are below it."""
        return f"{self.storage.url.rstrip('/')}/{self.name}"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        """The ids of the Airflow connections of inputs, decoders, outputs, listeners and ledger, each once."""
        named = [conn_id for _, part in self.parts for conn_id in part.connection_ids]
        named += [conn_id for listener in self.listeners for conn_id in listener.connection_ids]
        if self.ledger.startswith(CONNECTION_PREFIX):
            named.append(self.ledger.removeprefix(CONNECTION_PREFIX))
        return tuple(dict.fromkeys(named))

    @property
    def parts(self) -> Iterator[tuple[str, KindDefinition]]:
        """Yields each input, its decoders and each output, with its place in the definition."""
        for source in self.inputs:
            yield f"inputs.{source.id}", source
            yield from ((f"inputs.{source.id}.{field}", decoder) for field, decoder in source.decoders.items())
        yield from ((f"outputs.{output.id}", output) for output in self.outputs)

    def input(self, input_id: str) -> Input:
        """The input with this id; KeyError names the ones there are."""
        for source in self.inputs:
            if source.id == input_id:
                return source
        raise KeyError(
            f"stream {self.name} has no input {input_id!r}. Its inputs are {', '.join(i.id for i in self.inputs)}"
        )

    def output(self, output_id: str) -> Output:
        """The output with this id; KeyError names the ones there are."""
        for output in self.outputs:
            if output.id == output_id:
                return output
        raise KeyError(
            f"stream {self.name} has no output {output_id!r}. Its outputs are {', '.join(o.id for o in self.outputs)}"
        )

    def elasticsearch_output(self, output_id: str) -> ElasticsearchOutput | None:
        """The output with this id if it writes documents; None if there is no such output, or it is another one."""
        return next((output for output in self.elasticsearch_outputs if output.id == output_id), None)

    def output_of_step(self, step: str) -> Output:
        """The output that the ledger knows by this name; KeyError names the ones there are."""
        for output in self.outputs:
            if output.step == step:
                return output
        raise KeyError(f"stream {self.name} has no step {step!r}. Its steps are {', '.join(self.steps)}")

    def transform_of(self, output: Output) -> str | None:
        """The reference of the output's transform: its own, or the stream's."""
        return output.transform or self.transform

    def sends_bytes(self, output: Output) -> bool:
        """Whether the output gets the bytes of values that no transform changes, and not what a decoder makes of them.

        Which outputs have a transform is not asked here (`transform_of`).
        """
        decoders = [source.value_decoder for source in self.inputs]
        return output.sends_bytes and (
            not output.writes_json or all(decoder.bytes_are_json and not decoder.is_framed for decoder in decoders)
        )

    def group_of(self, source: KafkaInput) -> str:
        """The consumer group under which lag tools see the input."""
        return source.group or f"headrace-{self.name}-{source.id}"
