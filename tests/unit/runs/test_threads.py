"""Blocking calls of an event loop: those of a ledger that hangs hold few threads, and nobody else's."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest

from headrace.runs.threads import THREADS, in_thread

who = contextvars.ContextVar("who", default="nobody")


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """What the calls to a hanging ledger wait for."""
    event = threading.Event()
    yield event
    event.set()


async def fill(url: str, call) -> list[asyncio.Task]:
    """More calls to the ledger than it has threads."""
    tasks = [asyncio.create_task(in_thread(url, call)) for _ in range(THREADS + 20)]
    await asyncio.sleep(0.1)
    return tasks


def test_a_hanging_ledger_holds_no_thread_of_others(answer):
    async def scenario() -> tuple[str, str]:
        tasks = await fill("hangs-1", answer.wait)
        others = await asyncio.wait_for(in_thread("works", lambda: "works"), 10)
        default = await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10)
        answer.set()
        await asyncio.gather(*tasks)
        return others, default

    assert asyncio.run(scenario()) == ("works", "free")


def test_calls_that_have_not_begun_go_with_their_tasks(answer):
    begun: list[int] = []

    def call() -> None:
        begun.append(1)
        answer.wait()

    async def scenario() -> None:
        tasks = await fill("hangs-2", call)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer.set()
        await in_thread("hangs-2", lambda: None)

    asyncio.run(scenario())
    assert len(begun) == THREADS


def test_a_call_has_the_context_of_its_task():
    async def scenario() -> str:
        who.set("the task")
        return await in_thread("works", who.get)

    assert asyncio.run(scenario()) == "the task"
