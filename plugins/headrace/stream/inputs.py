"""The inputs of a stream: Kafka topics by name or by pattern, and receivers of other sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    PositiveInt,
    SerializeAsAny,
    Tag,
    WrapValidator,
    field_validator,
    model_validator,
)

from headrace.stream.contract import INPUT_SHAPES, KindDefinition, Shape
from headrace.stream.ddl import parse_columns
from headrace.stream.decoder import BytesDecoder, DecoderDefinition
from headrace.stream.decoders import Decoder
from headrace.stream.model import CalledClass, Identifier, Part, Texts, check_identifier, is_reference, validate_part
from headrace.stream.secrets import Servers
from headrace.stream.topic_pattern import matches, topic_pattern

# The librdkafka settings that a stream may set. headrace sets those that affect offsets, assignment or delivery itself
# (rules 1 to 3 of the design). Secrets and security settings belong in the connection.
CLIENT_SETTINGS = frozenset(
    {
        "check.crcs",
        "client.id",
        "client.rack",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.wait.max.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "metadata.max.age.ms",
        "queued.min.messages",
        "receive.message.max.bytes",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.receive.buffer.bytes",
        "socket.timeout.ms",
        "statistics.interval.ms",
        "topic.metadata.refresh.interval.ms",
    }
)

# Internal topics of Kafka and its ecosystem; a pattern never matches them.
_INTERNAL_TOPIC = re.compile(r"^__.*|^_(schemas|confluent.*)$")


_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class StartingTimestamp(Part):
    """Start at the first record whose timestamp is at or after this one (milliseconds since the Unix epoch)."""

    timestamp_ms: int = Field(ge=0)


class StartingOffsets(Part):
    """Start at these offsets, by topic and partition. Partitions that are not named start at their earliest offset."""

    offsets: dict[str, dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]]


class InputDefinition(KindDefinition):
    """The base class of inputs: what a user writes in a stream's definition, and what headrace asks of an input.

    Every input has receivers. Those of Kafka are headrace's own. Any other input names the class of its receivers
    (`receiver_class`): each has one partition, its index, with the input's id as topic, and counts its offsets from 0.
    """

    shapes: ClassVar[Mapping[str, Shape]] = INPUT_SHAPES

    check: ClassVar[str | None] = "headrace.checks.connecting:check_receiver"

    datasets: ClassVar[str | None] = None
    """The dataset of a topic for OpenLineage, as "module:function": ``function(input, topic, find_connection)`` returns
    a `Dataset`. ``find_connection`` returns an Airflow connection by its id. None: it has no dataset."""

    id: Identifier
    receivers: PositiveInt = 1
    preferred_hosts: tuple[str, ...] = Field(
        default=(), description="Hosts on which the receivers should run: one for all, or one for each."
    )
    key_decoder: Decoder = BytesDecoder()
    value_decoder: Decoder = BytesDecoder()

    @field_validator("id")
    @classmethod
    def _id_is_an_identifier(cls, value: str) -> str:
        # A class of another package may give its id the type str.
        return check_identifier(value)

    @property
    def decoders(self) -> Mapping[str, DecoderDefinition]:
        """The decoders of keys and of values, by their fields."""
        return {"key_decoder": self.key_decoder, "value_decoder": self.value_decoder}

    @property
    def columns_beside(self) -> tuple[str, ...]:
        """The columns of its records that the value's decoder gives beside the value."""
        return (
            tuple(part.name for part in parse_columns(self.value_decoder.beside)) if self.value_decoder.beside else ()
        )

    @property
    def receiver_class(self) -> str | None:
        """The class of its receivers, which extends ``headrace.receiver.Receiver``, as "module:Class"; None for Kafka,
        which headrace reads itself."""
        return None

    @property
    def keywords(self) -> dict[str, JsonValue]:
        """The keyword arguments with which the class of its receivers is called."""
        return {}

    @property
    def in_kafka(self) -> KafkaInput | None:
        """The input itself if Kafka keeps its records, which can be read again from there by their offsets. None: once
        a record is received, only the log has it."""
        return None

    @property
    def topic_id(self) -> str:
        """Stands for a topic's id where Kafka gives none: the records are always of one and the same topic."""
        return f"receiver:{self.id}"

    @property
    def topic_names(self) -> tuple[str, ...]:
        """The topics of its records, as far as the definition names them."""
        return (self.id,)

    def matches(self, topic: str) -> bool:
        """Whether this input's records have this topic."""
        return topic == self.id

    @model_validator(mode="after")
    def _hosts_fit_the_receivers(self) -> Self:
        if len(self.preferred_hosts) not in (0, 1, self.receivers):
            raise ValueError(f"preferred_hosts must name one host, or one for each of the {self.receivers} receivers")
        return self


class KafkaInput(InputDefinition):
    """Topics of one Kafka cluster, read by ``receivers`` receivers.

    The cluster is given by ``connection``, the id of an Airflow connection of type ``kafka``, or by
    ``bootstrap_servers`` if no secret is needed. ``starting_offsets`` is used only for partitions for which the ledger
    has no position.
    """

    check: ClassVar[str | None] = "headrace.checks.connecting:check_kafka"
    datasets: ClassVar[str | None] = "headrace.lineage:topic_name"

    kind: Literal["kafka"] = "kafka"
    id: Identifier = "records"
    connection: str | None = None
    bootstrap_servers: Servers | None = None
    topics: Texts = ()
    topic_pattern: str | None = None
    group: str | None = Field(
        default=None, description="A consumer group for lag tools only: the positions are in the ledger."
    )
    starting_offsets: Literal["earliest", "latest"] | StartingTimestamp | StartingOffsets = "earliest"
    on_lost_offsets: Literal["fail", "reset"] = Field(
        default="fail", description="What happens to a partition whose next offset Kafka no longer has."
    )
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)

    @field_validator("topics")
    @classmethod
    def _topics_are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [topic for topic in value if not _TOPIC.fullmatch(topic) or topic in (".", "..")]
        if wrong:
            raise ValueError(
                f"holds {', '.join(map(repr, wrong))}; a topic's name has 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-', "
                "and a regular expression goes into topic_pattern"
            )
        double = sorted({topic for topic in value if value.count(topic) > 1})
        if double:
            raise ValueError(f"names {', '.join(double)} twice")
        return value

    @field_validator("topic_pattern")
    @classmethod
    def _pattern_is_matched_in_linear_time(cls, value: str | None) -> str | None:
        if value is not None:
            topic_pattern(value)
        return value

    @field_validator("client")
    @classmethod
    def _client_settings_are_allowed(
        cls, value: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        refused = sorted(set(value) - CLIENT_SETTINGS)
        if refused:
            raise ValueError(
                f"{', '.join(refused)} cannot be set here: offsets, assignment and delivery are headrace's own, and "
                "security settings belong in the Kafka connection. "
                f"Allowed are {', '.join(sorted(CLIENT_SETTINGS))}"
            )
        return value

    @model_validator(mode="after")
    def _says_where_and_what(self) -> Self:
        if (self.connection is None) == (self.bootstrap_servers is None):
            raise ValueError("name either connection (an Airflow connection id) or bootstrap_servers")
        if bool(self.topics) == (self.topic_pattern is not None):
            raise ValueError("name either topics or topic_pattern")
        internal = [topic for topic in self.topics if _INTERNAL_TOPIC.match(topic)]
        if internal:
            raise ValueError(f"topics holds Kafka's internal {', '.join(internal)}; name topics of your own")
        if isinstance(self.starting_offsets, StartingOffsets):
            others = [topic for topic in self.starting_offsets.offsets if not self.matches(topic)]
            if others:
                raise ValueError(f"starting_offsets names {', '.join(others)}, which this input does not read")
        return self

    @property
    def description(self) -> tuple[str, str]:
        where = f"connection `{self.connection}`" if self.connection else f"`{self.bootstrap_servers}`"
        return f"Kafka, {where}", ", ".join(self.topics) or f"topics matching `{self.topic_pattern}`"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.connection is None else (self.connection,)

    @property
    def in_kafka(self) -> KafkaInput:
        return self

    @property
    def topic_names(self) -> tuple[str, ...]:
        return self.topics

    def matches(self, topic: str) -> bool:
        """Whether this input reads the topic. A pattern must match the whole name; it never matches internal topics."""
        if self.topic_pattern is None:
            return topic in self.topics
        return not _INTERNAL_TOPIC.match(topic) and matches(self.topic_pattern, topic)

    def topics_shared_with(self, other: KafkaInput) -> tuple[str, ...]:
        """The topics that both inputs read from the same cluster, by name or by the same pattern. Two different
        patterns are not compared."""
        if not self.reads_from(other.connection, other.bootstrap_servers):
            return ()
        if self.topic_pattern is not None and self.topic_pattern == other.topic_pattern:
            return (self.topic_pattern,)
        named = dict.fromkeys((*self.topics, *other.topics))
        return tuple(topic for topic in named if self.matches(topic) and other.matches(topic))

    def reads_from(self, connection: str | None, bootstrap_servers: str | None) -> bool:
        """Whether it reads from the cluster of this connection or of these servers, as far as a definition shows it."""
        if self.connection is not None:
            return self.connection == connection
        ours, theirs = (set((text or "").split(",")) - {""} for text in (self.bootstrap_servers, bootstrap_servers))
        return not ours.isdisjoint(theirs)


class ReceiverInput(CalledClass, InputDefinition):
    """A source other than Kafka, read by ``receivers`` objects of a class that extends ``headrace.receiver.Receiver``.

    The class is found by its name on the machine where it runs, and made with ``arguments`` as keyword arguments; it is
    never pickled. Its records have the input's id as topic, the receiver's index as partition, and the running number
    of the record as offset.
    """

    kind: Literal["receiver"] = "receiver"
    receiver: str = Field(description='"module:Class" of a class that extends headrace.receiver.Receiver.')

    @field_validator("receiver")
    @classmethod
    def _receiver_is_a_reference(cls, value: str) -> str:
        if not is_reference(value):
            raise ValueError('must be "module:Class"')
        return value

    @property
    def description(self) -> tuple[str, str]:
        return f"`{self.receiver}`", self.id

    @property
    def receiver_class(self) -> str:
        return self.receiver


_BUILT_IN = (KafkaInput, ReceiverInput)


def _kind(value: Any) -> str:
    """An input without a kind is Kafka's."""
    kind = value.get("kind", "kafka") if isinstance(value, dict) else getattr(value, "kind", "kafka")
    return str(kind)


if TYPE_CHECKING:
    Input = InputDefinition
else:
    Input = Annotated[
        Annotated[
            Annotated[KafkaInput, Tag("kafka")] | Annotated[ReceiverInput, Tag("receiver")],
            Discriminator(
                _kind,
                custom_error_type="input_kind",
                custom_error_message='has a kind that is neither "kafka" nor "receiver"',
            ),
        ],
        WrapValidator(partial(validate_part, InputDefinition, _BUILT_IN, "headrace.inputs")),
        # An input of another package is none of the union.
        SerializeAsAny(),
    ]
