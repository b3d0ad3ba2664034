from __future__ import annotations

from headrace.spark.failures import first_cause

SPARK = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "worker.py", line 1, in main
    process()
ValueError: the reason

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
Caused by: something in Java
"""


def test_the_python_error_below_sparks_stack_is_the_cause() -> None:
    assert first_cause(RuntimeError(SPARK)) == "ValueError: the reason"


def test_a_java_error_is_told_by_its_innermost_cause() -> None:
    text = "An error occurred while calling o1.save.\n: org.Outer: outer\n\tat x\n"
    assert first_cause(RuntimeError(text)) == "org.Outer: outer"
    assert first_cause(RuntimeError(text + "Caused by: org.Inner: inner\n\tat y\n")) == "org.Inner: inner"


def test_other_errors_are_their_first_line() -> None:
    assert first_cause(KeyError("x")) == "KeyError: 'x'"
    assert first_cause(RuntimeError("\none\ntwo")) == "RuntimeError: one"
    assert first_cause(RuntimeError()) == "RuntimeError"
