"""The plugin's web application is made at its first request, once."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import pytest

from headrace.ui.plugin import LazyApp


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("an_application")
    module.made = 0  # type: ignore[attr-defined]

    def make() -> Any:
        module.made += 1
        if module.made == 1 and getattr(module, "fails", False):
            raise RuntimeError("its module cannot be imported")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["served"] = True

        return app

    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_application", module)
    return module


async def _requests(app: LazyApp, count: int) -> list[Any]:
    scopes: list[dict[str, Any]] = [{} for _ in range(count)]
    failures = await asyncio.gather(*(app(scope, None, None) for scope in scopes), return_exceptions=True)
    return [scope.get("served") or failure for scope, failure in zip(scopes, failures, strict=True)]


def test_the_application_is_made_once_for_concurrent_requests(factory: Any) -> None:
    app = LazyApp("an_application:make")
    assert factory.made == 0
    assert asyncio.run(_requests(app, 5)) == [True] * 5
    assert factory.made == 1


def test_after_a_failure_the_next_request_tries_again(factory: Any) -> None:
    factory.fails = True
    app = LazyApp("an_application:make")

    async def twice() -> tuple[list[Any], list[Any]]:
        return await _requests(app, 2), await _requests(app, 1)

    first, second = asyncio.run(twice())
    assert [type(each) for each in first] == [RuntimeError, RuntimeError]
    assert second == [True]
