"""Checks that a part of another package keeps its contract (docs/extending.md), each in one line::

    def test_the_contract(tmp_path):
        check_output(NdjsonOutput(path=f"{tmp_path}/lines"))

The package must be installed, since stored definitions find its classes by entry points.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.errors import Failure, HeadraceError
from headrace.receiver.receiver import Receiver, check_receiver_class, load_receiver_class
from headrace.spark.outputs.writer import AttemptReplacedError
from headrace.spark.sessions import local_session
from headrace.stream import ConsoleOutput, KafkaInput, Stream, Utf8Decoder
from headrace.stream.stream import check_extensions
from headrace.testing.receivers import RunningReceiver, run_receiver
from headrace.testing.transforms import FIRST_BATCH_TIME, TransformRun, run_transform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.stream import DecoderDefinition, InputDefinition, OutputDefinition
    from headrace.stream.contract import KindDefinition

__all__ = ["ContractError", "check_decoder", "check_input", "check_output"]


class ContractError(HeadraceError):
    """An input, a decoder or an output does not keep its contract."""

    failure = Failure.CODE


def check_output(
    output: OutputDefinition,
    values: Sequence[str] = ("one", "two", "three"),
    *,
    read: Callable[[], Any] | None = None,
    errors: Sequence[Exception] = (),
    spark: SparkSession | None = None,
) -> None:
    """Check an output: its declarations, its definition as JSON and pickled, and its writer with several attempts.

    The writer gets a batch of these values, again in a second attempt, then late in the first one, which the second
    has replaced; and a batch without records.

    Args:
        output: the definition, with a target that is there.
        values: the values of the records, which are decoded as UTF-8.
        read: returns what the target holds, in a form that can be compared. It must be the same after each attempt.
        errors: examples of the errors that the writer raises.
        spark: a session, such as that of `local_session`; by default one is started.

    Raises:
        ContractError: the output does not keep its contract.
        StreamDefinitionError: an attribute has a wrong shape, or a stored definition cannot be used.
    """
    for error in errors:
        _check_error(error)
    with _stream(outputs=output) as stream, _session(spark) as session:
        _check_definition(stream, output)
        run = run_transform(stream, list(values), spark=session)
        _check_counts(run, 1)
        held = None if read is None else read()
        _check_counts(run, 2)
        _check_same(held, read, "A second attempt at the same batch changed what the target holds.")
        try:
            run.write(attempt=1)
        except AttemptReplacedError:
            pass
        except Exception as error:
            raise ContractError(
                f"A first attempt that went on after the second raised {type(error).__name__}, and not "
                "AttemptReplacedError."
            ) from error
        _check_same(held, read, "An attempt that a later one has replaced changed what the target holds.")
        later = FIRST_BATCH_TIME + timedelta(seconds=10)
        _check_counts(run_transform(stream, [], spark=session, batch_time=later), 1)


def check_decoder(
    decoder: DecoderDefinition,
    values: Sequence[bytes | str],
    *,
    refused: Sequence[bytes | str] = (),
    spark: SparkSession | None = None,
) -> None:
    """Check a decoder: its declarations, its definition as JSON and pickled, and its class on some values.

    Args:
        decoder: the definition.
        values: values that it decodes. A record without a value is added.
        refused: values that it does not decode.
        spark: a session, such as that of `local_session`; by default one is started.

    Raises:
        ContractError: the decoder does not keep its contract.
        StreamDefinitionError: an attribute has a wrong shape, or a stored definition cannot be used.
    """
    source = KafkaInput(bootstrap_servers="localhost:1", topics="records", value_decoder=decoder)
    with _stream(inputs=source, outputs=ConsoleOutput()) as stream, _session(spark) as session:
        _check_definition(stream, decoder)
        run = run_transform(stream, [*values, *refused, None], spark=session)
        rows, left = run.rows(), run.undecodable()
        if len(rows) != len(values) + 1 or len(left) != len(refused):
            reasons = [record["undecodable_reason"] for record in left]
            raise ContractError(
                f"Of {len(values)} values and a record without one, {len(rows)} are decoded; of {len(refused)} others, "
                f"{len(left)} are refused ({reasons})."
            )
        if [row["value"] for row in rows].count(None) != 1:
            raise ContractError("A decoded value is null without a reason, or a record without a value is not null.")
        if run.rows() != rows:
            raise ContractError("The same values were decoded to others the second time.")


def check_input(source: InputDefinition, *, records: int) -> None:
    """Check an input: its declarations, its definition as JSON and pickled, and the class of its receivers.

    A receiver runs until it has given so many records. Then another object goes on from the first position that was
    stored before the last of them, as after a crash: it must give the same records. Without positions, or with one call
    of ``store`` for all records, this cannot be seen.

    Args:
        source: the definition, with a source that is there.
        records: how many records the source has, at least.

    Raises:
        ContractError: the input does not keep its contract.
        ReceiverClassError: the class of its receivers cannot be found, or does not take the input's keywords.
        ReceiverTestError: the receiver has not given so many records in time.
        StreamDefinitionError: an attribute has a wrong shape, or a stored definition cannot be used.
    """
    with _stream(inputs=source, outputs=ConsoleOutput()) as stream:
        _check_definition(stream, source)
    check_receiver_class(source)
    made = load_receiver_class(source)
    whole = _received(made, source, records)
    stored = next(((count, position) for count, position in whole.positions.items() if count < records), None)
    if stored is None:
        return
    count, position = stored
    rest = _received(made, source, records - count, position)
    if rest.values[: records - count] != whole.values[count:records]:
        raise ContractError(
            f"A receiver that went on from the position {position!r}, which was stored with record {count}, gave other "
            "records than one that was not stopped there."
        )


def _received(made: type[Receiver], source: InputDefinition, records: int, position: Any = None) -> RunningReceiver:
    """A receiver that has ended after this many records, or some more."""
    with run_receiver(
        lambda: made(**source.keywords), position=position, receivers=source.receivers, by_call=True
    ) as running:
        running.wait_for(records)
    return running


@contextmanager
def _stream(**parts: Any) -> Iterator[Stream]:
    source = KafkaInput(bootstrap_servers="localhost:1", topics="records", value_decoder=Utf8Decoder())
    with tempfile.TemporaryDirectory() as folder:
        places = {"storage": f"{folder}/storage", "ledger": f"sqlite:///{folder}/ledger.db"}
        yield Stream(**{"name": "contract", "inputs": source, "batch_interval": "10 s", **places, **parts})


@contextmanager
def _session(spark: SparkSession | None) -> Iterator[SparkSession]:
    if spark is not None:
        yield spark
        return
    with local_session() as own:
        yield own


def _check_definition(stream: Stream, part: KindDefinition) -> None:
    check_extensions(stream)
    if pickle.loads(pickle.dumps(part)) != part:  # noqa: S301 - its own
        raise ContractError(f"{type(part).__name__} is another one when it is pickled.")


def _check_counts(run: TransformRun, attempt: int) -> None:
    counts = run.write(attempt=attempt)
    if not isinstance(counts, Mapping) or not all(isinstance(name, str) for name in counts):
        raise ContractError(f"The writer returned {counts!r}, not a mapping of names to counts.")
    try:
        json.dumps(dict(counts))
    except (TypeError, ValueError) as error:
        raise ContractError(f"The writer returned counts that are no JSON: {error}.") from error


def _check_same(held: Any, read: Callable[[], Any] | None, otherwise: str) -> None:
    if read is not None and (now := read()) != held:
        raise ContractError(f"{otherwise} Before: {held!r}, now: {now!r}.")


def _check_error(error: Exception) -> None:
    name = type(error).__name__
    if not isinstance(error, HeadraceError):
        raise ContractError(f"{name} does not extend HeadraceError, so that it is taken for an error of the code.")
    if not isinstance(error.failure, Failure):
        raise ContractError(f"The failure of {name} is {error.failure!r}, which is no Failure.")
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    except Exception as problem:
        raise ContractError(
            f"{name} cannot be pickled: {problem}.",
            remedy="Let its __init__ take what it gives to HeadraceError.__init__, or define __reduce__.",
        ) from problem
    if (str(again), again.failure) != (str(error), error.failure):
        raise ContractError(f"{name} is another one when it is pickled: {again!r}.")
