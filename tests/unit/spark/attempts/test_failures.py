from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import elastic_transport
import httpx
import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException
from pyspark.errors import AnalysisException, PySparkException

from headrace.errors import Failure, HeadraceError
from headrace.kafka.errors import RangesGoneError
from headrace.ledger.errors import LedgerUnavailableError
from headrace.spark.attempts.batch_command import TaskGoneError
from headrace.spark.attempts.failures import (
    AttemptFailedError,
    ended_from_outside,
    failure_of,
    first_cause,
    python_account,
    task_cause,
)
from headrace.spark.outputs.writer import OutputRowsError
from headrace.spark.records.transforms import TransformError
from headrace.spark.termination import Terminated

SPARK = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1, in main
    process()
ValueError: the reason

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
Caused by: something in Java
"""


def test_the_python_error_below_sparks_stack_is_the_cause() -> None:
    assert first_cause(RuntimeError(SPARK)) == "ValueError: the reason"


def test_an_error_of_the_users_function_has_its_file_and_line() -> None:
    frames = """
  File "/dags/orders.py", line 7, in total
    return Decimal(cents) * rate
  File "/venv/lib/python3.11/site-packages/rates/exchange.py", line 90, in rate
    raise ValueError(currency)
ValueError: the reason"""
    text = SPARK.replace("\nValueError: the reason", frames)
    assert first_cause(RuntimeError(text)) == "ValueError: the reason (/dags/orders.py, line 7)"
    of_headrace = text.replace("ValueError: the reason", "headrace.wal.errors.LogError: damaged")
    assert first_cause(RuntimeError(of_headrace)) == "headrace.wal.errors.LogError: damaged"
    with pytest.raises(ValueError, match="currency") as raised:
        raise ValueError("currency")
    assert first_cause(raised.value) == f"ValueError: currency ({__file__}, line {raised.tb.tb_lineno})"


def test_the_python_error_is_found_in_a_failed_data_source() -> None:
    """The data source could not be made."""
    text = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed to initialize Python data source writer: Traceback (most recent call last):"
    )
    assert first_cause(RuntimeError(f'{text}\n  File "x.py", line 1\nTopicMissingError: gone\n SQLSTATE: 38000')) == (
        "TopicMissingError: gone"
    )


def test_the_first_cause_of_a_java_error_is_its_innermost_one() -> None:
    text = "An error occurred while calling o1.save.\n: org.Outer: outer\n\tat x\n"
    assert first_cause(RuntimeError(text)) == "org.Outer: outer"
    assert first_cause(RuntimeError(text + "Caused by: org.Inner: inner\n\tat y\n")) == "org.Inner: inner"


def test_other_errors_are_their_first_line() -> None:
    assert first_cause(KeyError("x")) == "KeyError: 'x'"
    assert first_cause(RuntimeError("\none\ntwo")) == "RuntimeError: one"
    assert first_cause(RuntimeError()) == "RuntimeError"


def test_the_first_cause_of_a_lost_connect_server_is_grpcs() -> None:
    text = (
        "<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n"
        '\tdetails = "failed to connect to all addresses"\n\tdebug_error_string = "UNKNOWN"\n>'
    )
    assert first_cause(RuntimeError(text)) == "RuntimeError: failed to connect to all addresses"


def test_the_account_has_the_python_of_both_sides_and_no_java() -> None:
    remote = (
        "An exception was thrown from the Python worker.\n"
        'Traceback (most recent call last):\n  File "orders.py", line 7, in total\n    return cents * rate\n'
        "TypeError: no rate\n\n\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handle(X.scala:5)\n"
    )
    try:
        raise RuntimeError(remote)
    except RuntimeError as error:
        account = python_account(error)
    assert "test_failures.py" in account
    assert 'File "orders.py", line 7' in account
    assert account.endswith("TypeError: no rate")
    assert "org.apache.spark" not in account


def test_the_account_has_the_tasks_causes_and_no_frames_of_spark(
    in_task: Callable[[str], PySparkException],
) -> None:
    statement = (
        "try:\n    raise TargetBusyError('away')\nexcept TargetBusyError as e:\n    raise ValueError('not put') from e"
    )
    account = python_account(in_task(statement))
    assert "house.TargetBusyError: away" in account
    assert account.endswith("ValueError: not put")
    assert "worker.py" not in python_account(RuntimeError(SPARK))


def test_the_account_of_an_error_of_this_process() -> None:
    try:
        raise KeyError("rate")
    except KeyError as error:
        assert python_account(error).splitlines()[-1].startswith(f"KeyError: 'rate' ({__file__}, line ")


def of_executor(error: str) -> PySparkException:
    """As Spark tells in the driver of an error in an executor's Python."""
    return PySparkException(SPARK.replace("ValueError: the reason", error))


class TargetBusyError(HeadraceError):
    """An extension's error: its module is none of headrace's."""


class RefusedError(HeadraceError):
    """An extension's error whose property decides for each error."""

    @property
    def failure(self) -> Failure:  # type: ignore[override]
        return Failure.FINAL if "for ever" in self.what else Failure.CODE


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PySparkException]:
    """What the process of the batch gets of an error that a statement raises in one of Spark's workers. The extension's
    module is called ``house`` there, and this process cannot import it."""

    def fail(statement: str) -> PySparkException:
        with monkeypatch.context() as worker:
            worker.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="pyspark.daemon"))
            try:
                exec(HOUSE.format(statement), {"__name__": "house"})  # noqa: S102 - the test's own
            except Exception:
                text = traceback.format_exc()
        return PySparkException(f"An exception was thrown from the Python worker:\n{text}\n\tat org.x.Y")

    return fail


HOUSE = """
import traceback
from headrace.errors import Failure, HeadraceError
from headrace.spark.outputs.writer import OutputRowsError
class TargetBusyError(HeadraceError):
    "Its text does not say of what kind it is."
class RefusedError(HeadraceError):
    failure = Failure.CODE
class StatusError(HeadraceError):
    @property
    def failure(self):
        return Failure.CODE if "400" in self.what else Failure.PASSING
{}
"""


@pytest.mark.parametrize(
    ("statement", "failure"),
    [
        ("raise TargetBusyError('away')", Failure.PASSING),
        ("raise TargetBusyError('away\\n  of two lines', remedy='wait')", Failure.PASSING),
        ("raise RefusedError('no')", Failure.CODE),
        ("raise StatusError('400')", Failure.CODE),
        ("raise StatusError('503')", Failure.PASSING),
        ("raise OutputRowsError('no column')", Failure.CODE),
        ("raise ValueError('not put') from TargetBusyError('away')", Failure.PASSING),
        ("raise RefusedError('not put') from TargetBusyError('away')", Failure.CODE),
        ("raise TargetBusyError('away') from ValueError('x')", Failure.PASSING),
        ("raise ValueError('not put') from ConnectionResetError()", Failure.PASSING),
        ("raise ValueError('not put') from KeyError('x')", Failure.CODE),
        ("raise ExceptionGroup('puts', [KeyError('x'), TargetBusyError('away')])", Failure.PASSING),
        ("raise RuntimeError(traceback.format_exception(TargetBusyError('away'))[-1])", Failure.CODE),
        ("raise RuntimeError('failure: passing')", Failure.CODE),
    ],
)
def test_the_class_of_an_extensions_error_counts_in_a_task(
    in_task: Callable[[str], PySparkException], statement: str, failure: Failure
) -> None:
    error = in_task(statement)
    assert failure_of(error) is failure
    # However it is passed on in the process of the batch.
    assert failure_of(raised(RuntimeError("not written"), from_=error)) is failure
    assert failure_of(ExceptionGroup("writes", [error])) is failure


def test_an_extensions_error_in_a_task_reads_as_in_the_process(
    in_task: Callable[[str], PySparkException],
) -> None:
    error = in_task("raise TargetBusyError('the target is away')")
    assert first_cause(error) == "house.TargetBusyError: the target is away"


def test_a_traceback_outside_of_a_task_has_no_failure() -> None:
    assert TargetBusyError("away").__notes__ == []
    noted = TargetBusyError("away")
    noted.add_note("of the caller")
    assert noted.__notes__ == ["of the caller"]


def test_a_failure_that_is_none_is_refused_at_its_definition() -> None:
    """It is refused where the error is defined."""
    with pytest.raises(TypeError, match=r"LateError has the failure 'later', which is no headrace\.errors\.Failure"):

        class LateError(HeadraceError):
            failure = "later"  # type: ignore[assignment]


def raised(error: Exception, *, from_: Exception) -> Exception:
    error.__cause__ = from_
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RangesGoneError("gone"), Failure.FINAL),
        (of_executor("headrace.kafka.errors.RangesGoneError: gone"), Failure.FINAL),
        (of_executor("headrace.spark.records.wal_source.DamagedBlockError: damaged"), Failure.FINAL),
        (of_executor("headrace.spark.records.wal_source.UnreadableBlockError: missing"), Failure.PASSING),
        (of_executor("headrace.no_such_module.AnError: ?"), Failure.PASSING),
        (TransformError("takes two"), Failure.CODE),
        (KeyError("rate"), Failure.CODE),
        (of_executor("ValueError: no number"), Failure.CODE),
        (of_executor("orders.PriceError: none"), Failure.CODE),
        (AnalysisException("[UNRESOLVED_COLUMN]"), Failure.CODE),
        (LedgerUnavailableError("away"), Failure.PASSING),
        (ConnectionRefusedError("refused"), Failure.PASSING),
        (of_executor("TimeoutError: no answer"), Failure.PASSING),
        (httpx.ConnectError("refused"), Failure.PASSING),
        (psycopg.OperationalError("the connection is lost"), Failure.PASSING),
        (psycopg.ProgrammingError("no such column"), Failure.CODE),
        (elastic_transport.ConnectionTimeout("no answer"), Failure.PASSING),
        (KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)), Failure.PASSING),
        (KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)), Failure.CODE),
        (raised(ValueError("not written"), from_=ConnectionResetError()), Failure.PASSING),
        (raised(ValueError("not written"), from_=KeyError("rate")), Failure.CODE),
        # Its class is known to this process, though the worker's headrace is older and leaves no note.
        (of_executor(f"{__name__}.TargetBusyError: away"), Failure.PASSING),
        (of_executor("no_such_module_of_an_extension.TargetBusyError: away"), Failure.CODE),
        (TargetBusyError("away"), Failure.PASSING),
        (RefusedError("for ever"), Failure.FINAL),
        (RefusedError("now"), Failure.CODE),
        (raised(ValueError("not put"), from_=TargetBusyError("away")), Failure.PASSING),
        (raised(ValueError("not put"), from_=OutputRowsError("no column")), Failure.CODE),
        (PySparkException("An exception was thrown from the Python worker:\nValueError: no number"), Failure.CODE),
        (raised(ValueError("not put"), from_=PySparkException("the server is gone")), Failure.PASSING),
        (of_executor("psycopg.OperationalError: the connection is lost"), Failure.PASSING),
        (of_executor("pymongo.errors.ServerSelectionTimeoutError: none"), Failure.PASSING),
        (of_executor("psycopg.errors.UndefinedColumn: none"), Failure.CODE),
        (of_executor("headrace.elasticsearch.errors.ElasticsearchUnavailableError: away"), Failure.PASSING),
        (PySparkException("Job aborted: ExecutorLostFailure (executor 1 exited)"), Failure.PASSING),
        (Terminated(), Failure.PASSING),
    ],
)
def test_whose_fault_a_failure_is(error: BaseException, failure: Failure) -> None:
    assert failure_of(error) is failure


@pytest.mark.parametrize(
    ("error", "from_outside"),
    [
        (Terminated(), True),
        (KeyboardInterrupt(), True),
        (TaskGoneError("the task was killed"), True),
        (PySparkException("Job aborted: ExecutorLostFailure (executor 1 exited)"), True),
        (PySparkException("Job 3 cancelled because SparkContext was shut down"), True),
        (PySparkException("Python worker exited unexpectedly (crashed)."), True),
        (raised(AttemptFailedError("failed"), from_=PySparkException("StatusCode.UNAVAILABLE: Socket closed")), True),
        (of_executor("elastic_transport.ConnectionError: Socket closed"), False),
        (PySparkException("Job aborted due to stage failure"), False),
        (ConnectionRefusedError("refused"), False),
        (LedgerUnavailableError("away"), False),
        (TransformError("takes two"), False),
    ],
)
def test_what_ended_an_attempt_from_outside(error: BaseException, from_outside: bool) -> None:
    assert ended_from_outside(error) is from_outside


def test_a_killed_worker_is_named_and_not_sparks_advice() -> None:
    text = (
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting "
        "'spark.sql.execution.pyspark.udf.faulthandler.enabled' or'spark.python.worker.faulthandler.enabled' "
        "configuration to 'true' for the better Python traceback.\n\tat org.apache.spark.api.python.PythonRunner"
    )
    for cause in (task_cause(text), first_cause(RuntimeError(text))):
        assert cause.startswith("the task's Python process was killed or has crashed")


def test_the_cause_of_a_task_is_its_python_error_or_first_line() -> None:
    assert task_cause("ExecutorLostFailure (executor 0 exited) Reason: code 137") == (
        "ExecutorLostFailure (executor 0 exited) Reason: code 137"
    )
    traceback = (
        'PythonException: Traceback (most recent call last):\n  File "a.py", line 3, in b\nheadrace.x.Y: no\n\tat'
    )
    assert task_cause(traceback) == "headrace.x.Y: no"
