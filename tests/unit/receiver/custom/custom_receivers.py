"""Receivers that tests name in definitions. A test reads what they did in `Numbers.made` and gives them work by it."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from headrace.receiver import Receiver


class Numbers(Receiver):
    """Does nothing by itself: a test calls the methods of the objects in ``made``, the newest last."""

    made: ClassVar[list[Numbers]] = []
    on_start_error: ClassVar[Exception | None] = None

    def __init__(self, name: str = "numbers") -> None:
        self.name = name
        self.started = threading.Event()
        self.stopped = threading.Event()
        self.last_words: list[Any] = []
        Numbers.made.append(self)

    def on_start(self) -> None:
        if Numbers.on_start_error is not None:
            raise Numbers.on_start_error
        self.started.set()

    def on_stop(self) -> None:
        for record in self.last_words:
            self.store(record)
        self.stopped.set()


class Counter(Receiver):
    """Stores the numbers up to ``until``, each call with its position, and waits until each call is durable."""

    def __init__(self, until: int, step: int = 10) -> None:
        self.until, self.step = until, step

    def on_start(self) -> None:
        self.start_thread(self.count)

    def count(self) -> None:
        number = self.position or 0
        while number < self.until and not self.is_stopped:
            block = range(number, min(number + self.step, self.until))
            number = block.stop
            self.store([str(value) for value in block], position=number, wait=True)


not_a_class = 3


class NotAReceiver:
    """Extends nothing."""
