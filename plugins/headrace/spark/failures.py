"""Errors that came through Spark, told in a line."""

from __future__ import annotations


def first_cause(error: BaseException) -> str:
    """Why it failed, in one line: the last Python error below Spark's Java stack if there is one, else the first line.

    Spark wraps an executor's Python error in several Java exceptions, each with the whole text of the one below.
    """
    text = str(error)
    last = ""
    inside = False
    for line in text.splitlines():
        if line.strip().startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line[0].isspace():
            last, inside = line, False
    if last:
        return last
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
