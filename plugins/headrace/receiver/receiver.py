"""`Receiver`: the base class of custom receivers, which read a source other than Kafka; and the errors of receiving.

A receiver is named in a stream's definition as "module:Class" (`ReceiverInput`), and made where it runs.
This module imports neither Spark nor Airflow.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.stream import Stream
    from headrace.stream.inputs import Input


class ReceivingError(HeadraceError):
    """Receiving cannot continue. The receiver stops, and the tracker decides about its restart."""


class GeneratorStateError(ReceivingError):
    """The block generator's state does not allow the call."""


class KafkaClientError(ReceivingError):
    """The Kafka client has failed permanently; a new one is needed."""


class KeyVersionsError(ReceivingError):
    """Offsets no longer order the values of a key: new values would be lost."""


class StoreFailedError(ReceivingError):
    """A block could not be stored after all tries."""


class ReceiverStoppedError(ReceivingError):
    """A custom receiver gave records after its end, or its records could not be stored."""


class ReceiverClassError(ReceivingError):
    """The class of a custom receiver cannot be found, is no Receiver, or does not take the definition's arguments."""


RESTART_DELAY_SECONDS = 2.0
# A position is in the header of every block that has one, and in the ledger.
MAX_POSITION_BYTES = 64 << 10
_LAST_TIMESTAMP_MS = 253_402_300_799_999

JsonValue = Any
"""What ``json.dumps`` writes: None, bool, int, float, str, and lists and dicts of these."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record with its metadata. Texts are stored as UTF-8.

    ``timestamp_ms`` is in milliseconds since the Unix epoch; None: the time when headrace took the record.
    """

    value: bytes | str | None
    key: bytes | str | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_ms: int | None = None


Storable = Record | bytes | str
"""What `Receiver.store` takes as one record."""


class ReceiverHost(Protocol):
    """What runs a receiver. It is headrace's own; a test may give another one to `Receiver.attach`."""

    @property
    def index(self) -> int: ...
    @property
    def receivers(self) -> int: ...
    @property
    def position(self) -> str | None: ...
    def is_stopped(self, receiver: Receiver) -> bool: ...
    def store(self, receiver: Receiver, records: Iterator[Record], position: str | None, *, wait: bool) -> None: ...
    def start_thread(self, receiver: Receiver, target: Callable[[], object], name: str | None) -> None: ...
    def restart(self, receiver: Receiver, message: str, error: BaseException | None, delay_seconds: float) -> None: ...
    def stop(self, receiver: Receiver, message: str, error: BaseException | None) -> None: ...
    def report_error(self, _receiver: Receiver, message: str, error: BaseException | None) -> None: ...


class Receiver:
    """Reads a source and gives its records to headrace, which stores them in the stream's log.

    Extend it with `on_start` and `on_stop`. The constructor gets the definition's ``arguments`` as keyword arguments;
    the methods below work from `on_start` on. headrace makes a new object for every start and restart: what must
    outlive a restart belongs into a position. All methods may be called from any thread.
    """

    _host: ReceiverHost | None = None

    # -- to be written ---------------------------------------------------------------------------------------------

    def on_start(self) -> None:
        """Begin to receive. Must return soon: start threads, with `start_thread`.

        An exception is reported, and the receiver starts again after the delay of `restart`.
        """
        raise NotImplementedError(f"{type(self).__name__} must have on_start, which starts what receives")

    def on_stop(self) -> None:
        """End what `on_start` has begun: close connections, so that waiting threads wake up. `store` still works here.

        After it headrace waits for the receiver's threads, up to 10 s; after that `store` refuses theirs.
        """

    # -- to be used ------------------------------------------------------------------------------------------------

    def store(
        self, records: Storable | Iterable[Storable], *, position: JsonValue | None = None, wait: bool = False
    ) -> None:
        """Give one record, or many, to headrace. Waits while headrace can take no more (a full queue, a rate, a pause).

        Without ``wait``, the records are stored some time after it returns, in this order; they are lost if the process
        dies before. An iterable may be endless; each of its records is taken as soon as it is there. If the iterable
        raises, or has something that is no record, what it gave before is stored, unless the call has a position.

        Args:
            records: bytes, a text or a `Record` for one record; an iterable of these for many.
            position: where the source stands after these records, as a JSON value of at most 64 KiB whose keys are
                texts and whose lists are no tuples: JSON gives back only these unchanged. It is stored with the
                records, all or nothing, and after a restart `position` returns the last one that was stored. The
                records of one call are then held in memory, and must fit into one block (``limits.max_block_bytes``).
                Without records, the position is stored together with the next ones.
            wait: return only when the records are durable in log and ledger. Then they may be acknowledged to the
                source.

        Raises:
            ReceiverStoppedError: the receiver has ended, or its records could not be stored. With ``wait``, they may
                be stored all the same; without it, those not yet taken are not.
            TypeError, ValueError: a record or the position is not what is described here; no later record was taken,
                and with a position none.
        """
        self._attached.store(self, _records(records), position_text(position), wait=wait)

    def start_thread(self, target: Callable[[], object], name: str | None = None) -> None:
        """Run ``target`` in a thread of this receiver. If it raises, the error is reported and the receiver restarts;
        if it returns, nothing happens."""
        self._attached.start_thread(self, target, name)

    def restart(
        self, message: str, error: BaseException | None = None, delay_seconds: float = RESTART_DELAY_SECONDS
    ) -> None:
        """Have the receiver stopped and, after ``delay_seconds``, started again; the error is reported. Does not
        wait."""
        self._attached.restart(self, message, error, delay_seconds)

    def stop(self, message: str, error: BaseException | None = None) -> None:
        """Have the receiver stopped until the receiver job starts anew: the source has ended, or with ``error`` cannot
        be read, which marks the receiver's partition as failed. Does not wait."""
        self._attached.stop(self, message, error)

    def report_error(self, message: str, error: BaseException | None = None) -> None:
        """Report an error after which receiving continues: as an event in the ledger, and on the stream's page."""
        self._attached.report_error(self, message, error)

    @property
    def is_stopped(self) -> bool:
        """Whether this object's time is over: it has to stop or to restart, or has lost its lease. Threads end
        then."""
        return self._attached.is_stopped(self)

    @property
    def position(self) -> JsonValue | None:
        """Where the source stands: the position given last, or after a restart of the process the last one stored.

        None if no position was ever stored.
        """
        text = self._attached.position
        return None if text is None else json.loads(text)

    @property
    def index(self) -> int:
        """The number of this receiver among those of its input, from 0. It is the partition of its records."""
        return self._attached.index

    @property
    def receivers(self) -> int:
        """The number of receivers of its input, for a source that they divide among them."""
        return self._attached.receivers

    # -- of headrace -----------------------------------------------------------------------------------------------

    def attach(self, host: ReceiverHost) -> None:
        """Called once, before `on_start`, by what runs the receiver."""
        self._host = host

    @property
    def _attached(self) -> ReceiverHost:
        if self._host is None:
            raise ReceivingError(
                f"{type(self).__name__} is used before it is started.",
                remedy="Do in on_start what needs headrace; the constructor only keeps its arguments.",
            )
        return self._host


def _records(given: Storable | Iterable[Storable]) -> Iterator[Record]:
    if isinstance(given, bytes | str | Record):
        return iter((_record(given),))
    if hasattr(given, "keys") or hasattr(given, "_fields"):
        # Its names would be stored as records: of a dict, a data frame, a row, a named tuple.
        raise TypeError(f"{_not_storable(given)}, which has fields; give one record as bytes or a text, such as JSON")
    try:
        return map(_record, iter(given))
    except TypeError:
        raise TypeError(_not_storable(given)) from None


def _record(given: object) -> Record:
    """The record with its texts as bytes. What Arrow would refuse is refused here, in the caller's thread."""
    if isinstance(given, bytes):
        return Record(given)
    if isinstance(given, str):
        return Record(given.encode())
    if not isinstance(given, Record):
        raise TypeError(_not_storable(given))
    headers = tuple(_header(header) for header in given.headers)
    time_ms = given.timestamp_ms
    if time_ms is not None and not (isinstance(time_ms, int) and 0 <= time_ms <= _LAST_TIMESTAMP_MS):
        raise ValueError(f"a Record's timestamp_ms is from 0 (1970) to {_LAST_TIMESTAMP_MS} (year 9999), got {time_ms}")
    return Record(_bytes("value", given.value), _bytes("key", given.key), headers, time_ms)


def _bytes(name: str, given: object) -> bytes | None:
    if isinstance(given, bytes | None):
        return given
    if not isinstance(given, str):
        raise TypeError(f"a Record's {name} is bytes, str or None, got {type(given).__name__}")
    return given.encode()


def _header(given: Any) -> tuple[str, bytes | None]:
    try:
        name, value = given
    except (TypeError, ValueError):
        name = value = given
    if not isinstance(name, str) or not isinstance(value, bytes | None):
        raise TypeError(f"a Record's header is (name, bytes or None), got {given!r:.100}")
    name.encode()
    return name, value


def _not_storable(given: object) -> str:
    return f"store takes bytes, str, a Record, or an iterable of these, got {type(given).__name__}"


def position_text(position: JsonValue | None) -> str | None:
    """Return a position as JSON. Raises TypeError if that does not give it back unchanged, ValueError if too long."""
    if position is None:
        return None
    try:
        text = json.dumps(position, separators=(",", ":"), allow_nan=False)
        changed = _changed_by_json(position, "position")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"a position is a JSON value: {error}") from None
    if changed:
        raise TypeError(f"a position is a JSON value that is read back unchanged: {changed}")
    if len(text) > MAX_POSITION_BYTES:
        raise ValueError(f"a position has at most {MAX_POSITION_BYTES} bytes as JSON, got {len(text)}")
    return text


def _changed_by_json(given: JsonValue, where: str) -> str:
    """Say which part of a JSON value would come back as another one; an empty text if none would."""
    if isinstance(given, tuple):
        return f"{where} is a tuple, which would come back as a list"
    if not isinstance(given, dict | list):
        return ""
    for key, part in given.items() if isinstance(given, dict) else enumerate(given):
        if isinstance(given, dict) and not isinstance(key, str):
            return f"{where} has the key {key!r}, which would come back as a text"
        if problem := _changed_by_json(part, f"{where}[{key!r}]"):
            return problem
    return ""


def load_receiver_class(source: Input) -> type[Receiver]:
    """Import the class of the input's receivers. Raises ReceiverClassError, which names it."""
    from headrace.stream.model import StreamDefinitionError, load_reference

    try:
        loaded = load_reference(str(source.receiver_class), "receiver")
    except StreamDefinitionError as error:
        raise ReceiverClassError(f"Input {source.id}: {error.what}", remedy=error.remedy) from error
    if not isinstance(loaded, type) or not issubclass(loaded, Receiver):
        what = loaded.__name__ if isinstance(loaded, type) else f"a {type(loaded).__name__}"
        raise ReceiverClassError(
            f"Input {source.id}: {source.receiver_class} is {what}, which does not extend headrace.receiver.Receiver.",
            remedy="Name a class that does.",
        )
    return loaded


def check_receiver_class(source: Input) -> None:
    """Raise ReceiverClassError if the class cannot be found, is no Receiver, or does not take the arguments."""
    receiver_class = load_receiver_class(source)
    try:
        inspect.signature(receiver_class).bind(**source.keywords)
    except TypeError as error:
        raise ReceiverClassError(
            f"Input {source.id}: {source.receiver_class} does not take the arguments "
            f"({', '.join(source.keywords) or 'none'}): {error}.",
            remedy="Let ReceiverInput.arguments be its constructor's keyword arguments.",
        ) from None


def check_receiver_classes(stream: Stream) -> None:
    """Check the classes of all custom receivers of a stream, as `check_receiver_class`."""

    for source in stream.inputs:
        if source.receiver_class is not None:
            check_receiver_class(source)
