"""Explains why an attempt failed: the kind of failure, its first cause in one line, and the Python traceback.

Errors of the user's code, of headrace and of Spark come through Spark, inside several Java exceptions.
"""

from __future__ import annotations

import builtins
import importlib
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence

from headrace.errors import Failure, HeadraceError
from headrace.spark.sessions import first_line

# Spark's errors about what the transform made: its plan, or the data in it.
_VERDICTS = frozenset(
    {
        *("AnalysisException", "ParseException", "IllegalArgumentException", "UnsupportedOperationException"),
        *("ArithmeticException", "ArrayIndexOutOfBoundsException", "DateTimeException", "NumberFormatException"),
        *("PySparkTypeError", "PySparkValueError", "PySparkAttributeError", "PySparkNotImplementedError"),
        *("PySparkPicklingError", "PySparkAssertionError", "PySparkKeyError", "PySparkIndexError"),
    }
)
# Packages whose exceptions are about Spark, not about the code that runs in it.
_SPARKS = frozenset({"pyspark", "py4j", "grpc"})
_SURROUNDINGS = (OSError, EOFError, MemoryError)
# Clients of databases and services have their own classes, which are not OSErrors, for an unreachable server. The names
# of these classes, or of a base class, contain one of these words (for example DB-API's OperationalError).
_SERVER_AWAY = re.compile(
    r"Connect|Disconnect|TimeOut|Timeout|TimedOut|Unavailable|OperationalError|InterfaceError|NetworkError|NoHostAvailable"
    r"|NotLeader|MaxRetryError|ProtocolError|TransportError|ThrottlingException|TooManyRequests"
)
# confluent_kafka has one class for all errors; its text contains the error's name.
_KAFKA_AWAY = re.compile(r"code=_(TRANSPORT|ALL_BROKERS_DOWN|RESOLVE|\w*TIMED_OUT)\b")
# Spark goes on with advice about its settings.
_WORKER_GONE = "Python worker exited unexpectedly"
_WORKER_GONE_TEXT = "the task's Python process was killed or has crashed (if it was killed: for want of memory?)"
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in \S+')
# Files that are not the user's: Python's, Spark's, headrace's, and those of installed packages.
_LIBRARY = re.compile(
    r"\bpyspark\b|\b(site|dist)-packages\b|/lib/python3|^<|/headrace/(spark|elasticsearch|kafka|stream|wal|ledger)/"
)


class AttemptFailedError(HeadraceError):
    """Steps of an attempt failed. ``reason`` is the innermost reason; the error's cause has Spark's full text."""

    reason: str = ""


def attempt_failed(failures: Mapping[str, Exception], done: Collection[str]) -> HeadraceError:
    """One error for the failed steps of an attempt: the first one's, with the others and the ``done`` steps named."""
    causes = list(failures.values())
    first = causes[0]
    if len(causes) == 1 and not done:
        return as_attempt_failed(first)
    reasons = "; ".join(f"{step}: {reason_of(error)}" for step, error in failures.items())
    others = f"; done: {', '.join(done)}" if done else ""
    return _attempt_failed(reasons + others, causes, remedy=first.remedy if isinstance(first, HeadraceError) else None)


def as_attempt_failed(error: BaseException) -> HeadraceError:
    """The error itself if it is one of headrace's, otherwise an `AttemptFailedError` with its first cause."""
    return error if isinstance(error, HeadraceError) else _attempt_failed(first_cause(error), [error])


def _attempt_failed(reason: str, causes: Sequence[BaseException], *, remedy: str | None = None) -> AttemptFailedError:
    error = AttemptFailedError(f"The batch failed: {reason}", remedy=remedy)
    error.reason = reason
    error.__cause__ = causes[0]
    # If any of several failed steps may succeed on a retry, the attempt is worth another try.
    kinds = {failure_of(cause) for cause in causes}
    error.failure = next(kind for kind in Failure if kind in kinds)
    return error


def reason_of(error: BaseException) -> str:
    """Why the attempt failed, in one line."""
    return error.reason if isinstance(error, AttemptFailedError) else first_cause(error)


def failure_of(error: BaseException) -> Failure:
    """The kind of failure, by the error's class, or by the class of the executor's Python error in its text."""
    if isinstance(error, HeadraceError):
        return error.failure
    remote = _python_cause(str(error))
    if remote is not None:
        return _failure_by_name(remote.partition(":")[0].strip())
    if not isinstance(error, Exception):
        return Failure.PASSING
    if type(error).__module__.partition(".")[0] in _SPARKS:
        return Failure.CODE if type(error).__name__ in _VERDICTS else Failure.PASSING
    return Failure.PASSING if any(_is_of_surroundings(cause) for cause in _chain(error)) else Failure.CODE


def _is_of_surroundings(error: BaseException) -> bool:
    if isinstance(error, _SURROUNDINGS):
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ != "builtins"]
    if "KafkaException" in kinds:
        return _KAFKA_AWAY.search(str(error)) is not None
    return any(_SERVER_AWAY.search(kind) for kind in kinds)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: explicit ones, or errors that were being handled when it was raised."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _failure_by_name(name: str) -> Failure:
    """The kind of failure of an error that is only known by its class name."""
    module, _, kind = name.rpartition(".")
    if module.partition(".")[0] == "headrace":
        try:
            error_class = getattr(importlib.import_module(module), kind, None)
        except ImportError:
            error_class = None
        return (
            error_class.failure
            if isinstance(error_class, type) and issubclass(error_class, HeadraceError)
            else Failure.PASSING
        )
    if module.partition(".")[0] in _SPARKS:
        return Failure.CODE if kind in _VERDICTS else Failure.PASSING
    if module and _SERVER_AWAY.search(kind):
        return Failure.PASSING
    known = getattr(builtins, kind, None)
    passing = isinstance(known, type) and issubclass(known, _SURROUNDINGS)
    return Failure.PASSING if passing else Failure.CODE


def first_cause(error: BaseException) -> str:
    """The reason of the failure in one line: the Python error below Spark's Java stack, or else Java's innermost error.

    Spark wraps an executor's Python error in several Java exceptions, each with the whole text of the wrapped one. An
    error of the user's function has the file and the line where it was raised.
    """
    text = str(error)
    remote = _remote_cause(text)
    if remote is not None:
        return remote
    java = [line.partition("Caused by: ")[2] for line in text.splitlines() if line.startswith("Caused by: ")]
    if not java:
        # py4j's first line names the failed call, its second line the exception.
        java = [line[2:] for line in text.splitlines()[1:2] if line.startswith(": ")]
    if java:
        return java[-1]
    first = first_line(text)
    place = "" if isinstance(error, HeadraceError) else _place(_frames_of(error))
    return (f"{type(error).__name__}: {first}" if first else type(error).__name__) + place


def task_cause(text: str) -> str:
    """The reason in the text with which Spark reports that a task failed, in one line."""
    return _remote_cause(text) or next((line for line in text.splitlines() if line.strip()), "")


def _remote_cause(text: str) -> str | None:
    """The Python error in a task, with its place in the user's code, or that the task's process is gone."""
    remote = _python_cause(text)
    if remote is None:
        return _WORKER_GONE_TEXT if _WORKER_GONE in text else None
    if remote.startswith("headrace."):
        return remote
    return remote + _place(_frames_in(text))


def _python_cause(text: str) -> str | None:
    """The last Python error with a traceback in the text."""
    last = None
    inside = False
    for line in text.splitlines():
        # If a data source cannot be made, Spark puts its own words before "Traceback".
        if line.rstrip().endswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            last, inside = line, False
    return last


def _frames_in(text: str) -> list[tuple[str, str]]:
    """File and line of each frame of the last Python traceback in the text."""
    _, _, last = text.rpartition("Traceback (most recent call last):")
    return [(frame[1], frame[2]) for frame in map(_FRAME.match, last.splitlines()) if frame]


def _frames_of(error: BaseException) -> list[tuple[str, str]]:
    return [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]


def _place(frames: Sequence[tuple[str, str]]) -> str:
    """The innermost frame in the user's code as " (<file>, line <number>)"; "" if there is none."""
    users = [f" ({file}, line {line})" for file, line in frames if not _LIBRARY.search(file)]
    return users[-1] if users else ""


def python_account(error: BaseException) -> str:
    """The Python traceback for the author of the transform: this process's frames, then the executor's if the error
    came from there. Java's stack of hundreds of lines is left out.
    """
    account = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__))
    lines = str(error).splitlines()
    starts = [row for row, line in enumerate(lines) if line.strip().startswith("Traceback (most recent call last)")]
    if not starts:
        return account + first_cause(error)
    ends = (row for row in range(starts[-1] + 1, len(lines)) if lines[row] and not lines[row][0].isspace())
    remote = lines[starts[-1] + 1 : next(ends, len(lines))]
    return account + "In the executor:\n" + "\n".join([*remote, _python_cause(str(error)) or first_cause(error)])
