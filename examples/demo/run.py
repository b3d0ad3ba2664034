"""Runs one demo, from an empty folder to the result."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from examples.demo.flights_demo import Stopwatch, run_flights
from examples.demo.stack import DemoStack, dags_folder, jars_are_there
from examples.demo.view import View
from examples.demo.word_count_demo import LineServer, run_word_count
from rich.console import Console


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``rate`` is in records a second, None: as fast as possible. ``records`` applies to the flights alone."""

    example: str
    data: Path
    keep: bool = False
    records: int | None = None
    rate: float | None = None


class Result(Protocol):
    """The result of an example."""

    @property
    def holds(self) -> bool:
        """Whether the result is correct."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The result as a JSON object."""
        ...

    def print(self, console: Console) -> None:
        """Print the result for people."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The example's result, and the addresses of the stack if it was kept."""

    result: Result
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the result is correct."""
        return self.result.holds

    def to_dict(self) -> dict[str, Any]:
        """The result as a JSON object."""
        kept = {"kept": self.addresses} if self.addresses else {}
        return {**self.result.to_dict(), **kept}

    def print(self, console: Console) -> None:
        """Print the result for people."""
        self.result.print(console)
        if self.addresses:
            console.print("\nEverything stays up:")
            for name, address in self.addresses.items():
                console.print(f"  {name:<15}{address}", markup=False, highlight=False, soft_wrap=True)


def run_demo(options: DemoOptions, view: View) -> Outcome:
    """Start the stack, run the example, stop the stack unless it should be kept.

    Raises:
        DemoError: the example did not run to its end. Then, and on Ctrl-C, the stack is stopped even with ``keep``.
    """
    watch = Stopwatch()
    lines = LineServer() if options.example == "wordcount" else None
    settings = {} if lines is None else {"HEADRACE_LINES": lines.address}
    stack = DemoStack(options.data, dags_folder(), keep=options.keep, settings=settings)
    began = time.monotonic()
    finished = False
    try:
        with view:
            view.say(f"starting Kafka, Elasticsearch, Postgres and Airflow in {stack.data}")
            if not jars_are_there():
                view.say("this once, their jars are fetched from Maven Central, some 100 MB")
            with watch.over("start of the stack"):
                stack.start(view.stack)
            view.say(f"the stack is up; Airflow is at {stack.address('api-server')}")
            result: Result
            if lines is not None:
                result = run_word_count(stack, view, lines, rate=options.rate)
            else:
                result = run_flights(stack, view, records=options.records, rate=options.rate, watch=watch)
        finished = True
    finally:
        if lines is not None:
            lines.close()
        if not (finished and options.keep):
            view.say("stopping the stack" if finished else f"stopping the stack; its logs stay in {stack.data}")
            with watch.over("stop of the stack"):
                stack.stop()
        watch.seconds["altogether"] = round(time.monotonic() - began, 1)
    addresses = _addresses(stack) if options.keep else {}
    if addresses and lines is not None:
        addresses["to send lines"] = f"nc -lk {lines.address.replace(':', ' ')}"
    return Outcome(result, addresses)


def _addresses(stack: DemoStack) -> dict[str, str]:
    user, password = stack.login
    return {
        "Airflow": stack.address("api-server"),
        "login": f"{user} / {password}",
        "Elasticsearch": stack.address("elasticsearch"),
        "Kafka": stack.address("kafka"),
        "ledger": stack.ledger_url,
        "files and logs": str(stack.data),
        "to stop": f"{Path(sys.executable).with_name('headrace')} stack down --data {stack.data}",
    }
