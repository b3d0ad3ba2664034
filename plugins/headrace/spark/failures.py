"""Errors that came through Spark, told in a line, or with the Python that led to them."""

from __future__ import annotations

import traceback


def first_cause(error: BaseException) -> str:
    """Why it failed, in one line: the Python error below Spark's Java stack if there is one, else Java's innermost.

    Spark wraps an executor's Python error in several Java exceptions, each with the whole text of the one below.
    """
    text = str(error)
    last = ""
    inside = False
    for line in text.splitlines():
        # Spark begins the line with words of its own where a data source could not be made.
        if line.rstrip().endswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            last, inside = line, False
    if last:
        return last
    java = [line.partition("Caused by: ")[2] for line in text.splitlines() if line.startswith("Caused by: ")]
    if not java:
        # py4j's first line says which call failed, its second which exception.
        java = [line[2:] for line in text.splitlines()[1:2] if line.startswith(": ")]
    if java:
        return java[-1]
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def python_account(error: BaseException) -> str:
    """Where in Python it happened, for whoever wrote the transform: this process's frames, and below them those of the
    executor's Python if the error came from there. Java's stack, hundreds of lines, is left out.
    """
    account = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__))
    lines = str(error).splitlines()
    starts = [row for row, line in enumerate(lines) if line.strip().startswith("Traceback (most recent call last)")]
    if not starts:
        return account + first_cause(error)
    ends = (row for row in range(starts[-1] + 1, len(lines)) if lines[row] and not lines[row][0].isspace())
    remote = lines[starts[-1] + 1 : next(ends, len(lines))]
    return account + "In the executor:\n" + "\n".join([*remote, first_cause(error)])
