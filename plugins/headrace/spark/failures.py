"""Errors that came through Spark, told in a line."""

from __future__ import annotations


def first_cause(error: BaseException) -> str:
    """Why it failed, in one line: the Python error below Spark's Java stack if there is one, else Java's innermost.

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
    java = [line.partition("Caused by: ")[2] for line in text.splitlines() if line.startswith("Caused by: ")]
    if not java:
        # py4j's first line says which call failed, its second which exception.
        java = [line[2:] for line in text.splitlines()[1:2] if line.startswith(": ")]
    if java:
        return java[-1]
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
