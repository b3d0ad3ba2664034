"""The base class of every error that headrace raises on purpose; the attributes and the failures of an attempt."""

import sys
from enum import StrEnum
from typing import Any

from headrace.secrets import clean_handled, without_secrets

FAILURE = "failure"
"""The attribute of a failed attempt that holds its `Failure`."""

TRIED_WITH = "tried_with"
"""The attribute of a failed attempt that identifies the definition and the code that it ran with."""

INTERRUPTED = "interrupted"
"""The attribute of a failed attempt that was ended from outside: its process was killed, or what it ran in has gone."""

WARNING = "warning"
"""The attribute of a running attempt that says what delays it."""

REPAIR = "repair"
"""The attribute of an attempt that a repair made at a batch that its own run left unfinished."""

TRY_NUMBER = "try_number"
"""The attribute of an attempt that holds the try number of its task."""

RANGE = "range"
"""The attribute of an attempt that a run made for a range of batch times (`headrace.batch.range_progress`)."""


class Failure(StrEnum):
    """The cause of a failure, which determines whether to retry."""

    PASSING = "passing"
    """The environment: an unavailable server, a killed process, credentials that will be corrected. The repair tries it
    again until it succeeds, so that nobody has to clear all the batches of a night."""
    CODE = "code"
    """The user's code or definition, or rows that do not fit. The same attempt will most likely fail again, so the
    repair tries it again when the definition or the code has changed."""
    FINAL = "final"
    """Stored data is lost or damaged, and a retry does not restore it. The repair tries it again when the definition or
    the code has changed."""


_PAGE = "docs/troubleshooting.md"


class HeadraceError(Exception):
    """Something went wrong that a person can act on.

    ``what`` says what happened and where, ``remedy`` what to do about it. Both appear in task logs and on consoles, and
    often repeat foreign text, so the secrets in them are hidden (``headrace.secrets``), as are those of an error that
    is being handled when this one is made. ``failure`` determines whether a failed attempt is retried automatically.
    ``interrupts``: it says that the attempt was ended from outside.

    The text of headrace's own errors ends with their place on the troubleshooting page. An error whose text repeats
    another one's has the place of that one, its cause.
    """

    failure: Failure = Failure.PASSING
    interrupts: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a ``failure`` that is none, when the class is defined. Raises TypeError."""
        super().__init_subclass__(**options)
        declared = cls.__dict__.get("failure", Failure.PASSING)
        # A property decides for each error.
        if not isinstance(declared, Failure | property):
            raise TypeError(
                f"The error {cls.__module__}.{cls.__qualname__} has the failure {declared!r}, which is no "
                "headrace.errors.Failure. Give it Failure.PASSING, Failure.CODE or Failure.FINAL."
            )

    def __init__(self, what: str, *, remedy: str | None = None) -> None:
        what, remedy = without_secrets(what), None if remedy is None else without_secrets(remedy)
        super().__init__(what if remedy is None else f"{what} {remedy}")
        clean_handled()
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        text = super().__str__()
        own = type(self)
        if _PAGE in text or not own.__module__.startswith("headrace."):
            return text
        # A text of several lines ends with those of a log or a traceback.
        separator = "\n" if "\n" in text else " "
        return f"{text}{separator}({_PAGE}#{own.__name__})"

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """The notes that a traceback ends with; in a Spark task also the failure.

        Of a task's error only the traceback reaches the process of the batch, which may not have the error's class.
        """
        notes: list[str] = list(self.__dict__.get("_notes", ()))
        return [*notes, f"{FAILURE_NOTE}{self.failure}"] if _is_in_spark_task() else notes

    def add_note(self, note: str) -> None:
        """Add a note, as to every exception."""
        self.__dict__.setdefault("_notes", []).append(note)


FAILURE_NOTE = "failure: "
"""The beginning of the line of a traceback that names the failure of an error in a Spark task."""


def _is_in_spark_task() -> bool:
    """Whether this is one of Spark's Python workers: Spark starts them as modules of pyspark."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


_LONGEST_LINE = 300


def headline(error: str) -> tuple[str, str | None]:
    """Return the line of an error that matters, and the whole error if it has more.

    Of a Python traceback this is the line after the frames, of other errors the first one.
    """
    lines = [line.rstrip() for line in error.splitlines() if line.strip()]
    if not lines:
        return error, None
    first, inside = lines[0], False
    for line in lines:
        if line.lstrip().startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and not line[0].isspace():
            first, inside = line, False
    if len(first) > _LONGEST_LINE:
        first = first[:_LONGEST_LINE].rstrip() + " …"
    return first, None if error.strip() == first else error
