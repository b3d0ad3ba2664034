"""The example of an input in a package of its own: its definition, its receiver on a server, and in a whole stream."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.unit.stream.definitions import fields

from headrace.checks.connecting import check_part
from headrace.dags.declaration import describe
from headrace.stream import ConsoleOutput, Stream, StreamDefinitionError
from headrace.testing.extensions import ContractError, check_input
from headrace.testing.stream_on_clock import StreamOnClock

FOLDER = Path(__file__).parents[3] / "examples" / "extensions" / "http_input"
ALL = [{"id": number, "name": f"event {number}"} for number in range(1, 8)]
EVENTS = ALL
PAGE = 3


class Pages(BaseHTTPRequestHandler):
    """Gives the events, three at a time."""

    def do_GET(self) -> None:
        (after,) = parse_qs(urlsplit(self.path).query).get("after", ["0"])
        first = int(after)
        body = json.dumps(EVENTS[first : first + PAGE]).encode()
        self.send_response(200 if self.headers["Authorization"] else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type]:
    """The class of the input, whose package is installed, beside a server that the connection names."""
    info = tmp_path / "installed" / "headrace_http-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-http\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.inputs]\nhttp_events = headrace_http:HttpInput\n")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(info.parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f"http://me:secret@127.0.0.1:{server.server_port}")
    from headrace_http import HttpInput

    yield HttpInput
    server.shutdown()
    server.server_close()


def test_the_input_keeps_the_contract(kind: type) -> None:
    check_input(kind(connection="shop"), records=len(EVENTS))


def test_a_receiver_that_begins_again_breaks_the_contract(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_http_receiver import HttpReceiver, page

    def receive(receiver: Any) -> None:
        after = None
        while events := page("shop", "/events", after=after):
            after = events[-1]["id"]
            receiver.store([json.dumps(event) for event in events], position=after)

    monkeypatch.setattr(HttpReceiver, "_receive", receive)
    with pytest.raises(ContractError, match=r"from the position 3, .* record 3, gave other records"):
        check_input(kind(connection="shop"), records=len(EVENTS))


def test_a_stream_is_told_by_its_json_what_the_class_says(kind: type) -> None:
    source = {"kind": "http_events", "connection": "shop", "path": "/news"}
    stream = Stream.from_json(json.dumps({**json.loads(Stream(**fields()).to_json()), "inputs": [source]}))
    assert isinstance(stream.inputs[0], kind)
    assert "shop" in stream.connection_ids
    assert "| from | HTTP, connection `shop` | `/news`, 1 receiver(s) |" in describe(stream)
    assert [checked.error for checked in check_part(stream.inputs[0])] == [None]


def test_the_check_names_a_refused_login(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    address = urlsplit(os.environ["AIRFLOW_CONN_SHOP"])
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f"http://127.0.0.1:{address.port}")
    (checked,) = check_part(kind(connection="shop"))
    assert checked.error == "The server does not answer: 127.0.0.1 answers 401 Unauthorized."


def test_several_receivers_of_one_order_are_refused(kind: type) -> None:
    with pytest.raises(StreamDefinitionError, match=r"inputs\.events\.receivers: the pages of /events"):
        Stream(**fields(inputs=kind(connection="shop", receivers=2)))


def test_a_stream_stores_each_event_once(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kind(connection="shop", every_seconds=0.05)
    places = {"storage": str(tmp_path / "storage"), "ledger": f"sqlite:///{tmp_path}/ledger.db"}
    stream = Stream(**fields(inputs=source, outputs=ConsoleOutput(), **places))
    monkeypatch.setitem(globals(), "EVENTS", ALL[:4])
    with StreamOnClock(stream) as running:
        running.receive(records=4)
    monkeypatch.setitem(globals(), "EVENTS", ALL)
    with StreamOnClock(stream, start_ms=running.clock.now_ms()) as again:
        again.receive(records=len(ALL))
        again.advance(20)
        records = [record for batch in again.run_due() for record in batch.records]
    assert [json.loads(value or b"") for *_, value in records] == ALL
    assert [record[:3] for record in records] == [("events", 0, offset) for offset in range(len(ALL))]
