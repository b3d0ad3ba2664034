"""The input "http_events": an HTTP service that gives its events from page to page, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue, PositiveFloat

from headrace.stream import InputDefinition

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields


class HttpInput(InputDefinition):
    """Read ``path`` of the server of an Airflow connection: ``GET <path>?after=<id>`` answers a JSON list of objects.

    Each object is a record, and has an ``id``. The list is empty at the end; then the server is asked again after
    ``every_seconds``.
    """

    # Only the receiver job imports this module.
    check = "headrace_http_receiver:check"

    kind: Literal["http_events"] = "http_events"
    id: str = "events"
    connection: str
    path: str = "/events"
    every_seconds: PositiveFloat = 5.0

    @property
    def receiver_class(self) -> str:
        return "headrace_http_receiver:HttpReceiver"

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"connection": self.connection, "path": self.path, "every_seconds": self.every_seconds}

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return (self.connection,)

    @property
    def description(self) -> tuple[str, str]:
        return f"HTTP, connection `{self.connection}`", f"`{self.path}`"

    def problems(self, stream: StreamFields) -> Iterator[str]:  # noqa: ARG002 - every stream
        if self.receivers > 1:
            yield f"receivers: the pages of {self.path} are in one order, so one receiver reads them; leave it out"
