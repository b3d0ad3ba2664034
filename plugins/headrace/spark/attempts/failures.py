"""Explains why an attempt failed: the kind of failure, its first cause in one line, and the Python traceback.

Errors of the user's code, of headrace and of Spark come through Spark, inside several Java exceptions.
"""

from __future__ import annotations

import builtins
import importlib
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import FAILURE_NOTE, Failure, HeadraceError
from headrace.secrets import without_secrets
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
_OF_WORKER = "An exception was thrown from the Python worker"
# Between the tracebacks of a cause and of what it caused; and the beginnings of lines about the members of a group.
_JOINTS = ("The above exception was the direct cause of the following", "During handling of the above exception,")
_GROUP = re.compile(r"^ +[|+] ?")
_MEMBER = re.compile(r"[+-]+ \d+ -+$")
_NOTE = re.compile(rf"{FAILURE_NOTE}({'|'.join(Failure)})$")
# What a client of Spark, or Spark itself, reports when the application, the JVM or an executor has gone.
_SPARK_GONE = re.compile(
    r"StatusCode\.UNAVAILABLE|failed to connect to all addresses|Socket closed|SparkContext was shut down"
    r"|stopped SparkContext|ExecutorLostFailure|INVALID_HANDLE\.SESSION|Answer from Java side is empty"
    rf"|{_WORKER_GONE}"
)
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
    error.reason = without_secrets(reason)
    error.__cause__ = causes[0]
    # If any of several failed steps may succeed on a retry, the attempt is worth another try.
    kinds = {failure_of(cause) for cause in causes}
    error.failure = next(kind for kind in Failure if kind in kinds)
    return error


def reason_of(error: BaseException) -> str:
    """Why the attempt failed, in one line."""
    return error.reason if isinstance(error, AttemptFailedError) else first_cause(error)


def failure_of(error: BaseException) -> Failure:
    """The kind of failure of an error, here or in the Spark task whose Python traceback is in its text.

    Of the error and its causes, the outermost that is headrace's, an extension's or Spark's decides. Without one, a
    cause in the environment makes it a passing failure.
    """
    if not isinstance(error, Exception):
        return Failure.PASSING
    links = list(_links(error))
    declared = next((link.declared for link in links if link.declared is not None), None)
    if declared is not None:
        return declared
    return Failure.PASSING if any(link.is_of_surroundings for link in links) else Failure.CODE


@dataclass(frozen=True, slots=True)
class _Link:
    """One error of a chain of causes. ``declared``: the failure that its class stands for, if it is headrace's, an
    extension's or Spark's."""

    declared: Failure | None = None
    is_of_surroundings: bool = False


def _links(error: BaseException) -> Iterator[_Link]:
    """Yield the errors of the chain, the outermost first; those of a task in the place of Spark's error about it."""
    for cause in _chain(error):
        if isinstance(cause, HeadraceError):
            yield _Link(_failure_in(cause))
            continue
        remote = _remote_chain(str(cause))
        if remote:
            yield from (_remote_link(each) for each in remote)
        elif type(cause).__module__.partition(".")[0] in _SPARKS:
            yield _Link(_of_spark(type(cause).__name__))
        else:
            yield _Link(is_of_surroundings=_is_of_surroundings(cause))


def _of_spark(kind: str) -> Failure:
    return Failure.CODE if kind in _VERDICTS else Failure.PASSING


def _failure_in(error: HeadraceError) -> Failure:
    # A property of an extension's class may return anything.
    return error.failure if isinstance(error.failure, Failure) else Failure.PASSING


def ended_from_outside(error: BaseException) -> bool:
    """Whether the attempt was ended from outside: its process got a signal, or its task, its Spark application, its JVM
    or the executor that ran it has gone. Not if one of its outputs failed for another reason.
    """
    if not isinstance(error, Exception):
        return True
    return any(map(_says_what_has_gone, _chain(error)))


def _says_what_has_gone(error: BaseException) -> bool:
    if isinstance(error, HeadraceError):
        return error.interrupts
    of_spark = type(error).__module__.partition(".")[0] in _SPARKS
    # A Python error of an executor may have such words of another server.
    return of_spark and not _remote_chain(str(error)) and _SPARK_GONE.search(str(error)) is not None


def _is_of_surroundings(error: BaseException) -> bool:
    if isinstance(error, _SURROUNDINGS):
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ != "builtins"]
    if "KafkaException" in kinds:
        return _KAFKA_AWAY.search(str(error)) is not None
    return any(_SERVER_AWAY.search(kind) for kind in kinds)


def _chain(error: BaseException, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yield the error and its causes: explicit ones, or errors that were being handled when it was raised; of a group,
    each of its errors with theirs."""
    seen = set() if seen is None else seen
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        for member in getattr(following, "exceptions", ()) if isinstance(following, BaseExceptionGroup) else ():
            yield from _chain(member, seen)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


@dataclass(slots=True)
class _RemoteError:
    """An error in a task: the line of its traceback that names it, and the failure that its class declared there."""

    line: str
    declared: Failure | None = None


def _remote_link(error: _RemoteError) -> _Link:
    if error.declared is not None:
        return _Link(error.declared)
    name = error.line.partition(":")[0].strip()
    module, _, kind = name.rpartition(".")
    error_class = _class_of(module, kind)
    if error_class is not None and issubclass(error_class, HeadraceError):
        declared = error_class.failure
        return _Link(declared if isinstance(declared, Failure) else Failure.PASSING)
    top = module.partition(".")[0]
    if top == "headrace" or top in _SPARKS:
        # A class of headrace's that is not known is of another version.
        return _Link(Failure.PASSING if top == "headrace" else _of_spark(kind))
    if kind == "KafkaException":
        return _Link(is_of_surroundings=_KAFKA_AWAY.search(error.line) is not None)
    known = error_class or getattr(builtins, kind, None)
    is_known = isinstance(known, type) and issubclass(known, _SURROUNDINGS)
    return _Link(is_of_surroundings=is_known or bool(module and _SERVER_AWAY.search(kind)))


def _class_of(module: str, kind: str) -> type | None:
    """The class of this name, if its module is headrace's or this process has it already.

    No other module is imported: the text of an error may hold a record's, and so name any module.
    """
    if module.partition(".")[0] == "headrace":
        try:
            importlib.import_module(module)
        except ImportError:
            return None
    found = getattr(sys.modules.get(module), kind, None)
    return found if isinstance(found, type) else None


def first_cause(error: BaseException) -> str:
    """The reason of the failure in one line: the Python error below Spark's Java stack, or else Java's innermost error.

    Spark wraps an executor's Python error in several Java exceptions, each with the whole text of the wrapped one. An
    error of the user's function has the file and the line where it was raised. Its secrets are hidden.
    """
    return without_secrets(_first_cause(error))


def _first_cause(error: BaseException) -> str:
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
    return without_secrets(_remote_cause(text) or next((line for line in text.splitlines() if line.strip()), ""))


def _remote_cause(text: str) -> str | None:
    """The Python error in a task, with its place in the user's code, or that the task's process is gone."""
    chain = _remote_chain(text)
    if not chain:
        return _WORKER_GONE_TEXT if _WORKER_GONE in text else None
    error = chain[0]
    if error.declared is not None or error.line.startswith("headrace."):
        return error.line
    return error.line + _place(_frames_in(text))


def _python_cause(text: str) -> str | None:
    """The last Python error with a traceback in the text."""
    chain = _remote_chain(text)
    return chain[0].line if chain else None


def _remote_chain(text: str) -> list[_RemoteError]:
    """The last Python error with a traceback in the text, and then its causes, as the traceback has them."""
    chain: list[_RemoteError] = []
    inside = joined = False
    for raw in text.splitlines():
        line = _GROUP.sub("", raw)
        # If a data source cannot be made, Spark puts its own words before "Traceback". With
        # spark.sql.execution.pyspark.udf.hideTraceback.enabled there are only these words.
        if line.rstrip().endswith("Traceback (most recent call last):") or line.startswith(_OF_WORKER):
            inside = True
        elif inside and line and not line[0].isspace():
            # Causes come before the error that they caused.
            chain = [_RemoteError(line), *(chain if joined else ())]
            inside = joined = False
        elif line.startswith(_JOINTS) or _MEMBER.match(line):
            joined = True
        elif chain and not inside and (note := _NOTE.match(line)):
            chain[0].declared = Failure(note[1])
    return chain


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
        return without_secrets(account + first_cause(error))
    ends = (row for row in range(starts[-1] + 1, len(lines)) if lines[row] and not lines[row][0].isspace())
    end = next(ends, len(lines))
    first = starts.pop()
    # The causes of an error come before it.
    while starts and lines[first - 2].startswith(_JOINTS):
        first = starts.pop()
    remote = _without_frames_of_spark(lines[first + 1 : end])
    last = _python_cause(str(error)) or first_cause(error)
    return without_secrets(account + "In the executor:\n" + "\n".join([*remote, last]))


def _without_frames_of_spark(lines: Sequence[str]) -> list[str]:
    kept, of_spark = [], False
    for line in lines:
        if frame := _FRAME.match(line):
            of_spark = re.search(r"\bpyspark\b", frame[1]) is not None
        elif not line.startswith("    "):
            of_spark = False
        if not of_spark:
            kept.append(line)
    return kept
